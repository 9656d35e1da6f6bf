// Members of Moe: left operands of the frozen products, quantised where these are INT8. Included inside
// the class.

using FrozenT = typename Frozen<C>::T;
static constexpr bool kQuantised = Quantised<C>;

// Row scales of a quantised left operand of `depth` elements, per row.
int64_t scales_per_row(int64_t depth, bool in_groups) const { return in_groups ? depth / kSlice : 1; }

// pack_tokens for the frozen products; with int8 ones forward's rows may be quantised in groups, and
// backward's are first multiplied by the scales of the channels that they run along, those of `channels`
// (null: forward).
template <class RowOf>
void pack_frozen(const BlockRange& range, const RowOf& row_of, const Matrix* channels) const {
    if constexpr (!kQuantised) {
        pack_tokens(p.blocks + range.first, p.blocks + range.last, row_of);
    } else {
        const int64_t first = p.blocks[range.first].begin, depth = line_depth<FrozenT>(p.hidden_pad);
        const bool in_groups = channels == nullptr && p.in_groups;
        if (channels != nullptr) channel_scales(*channels, s.channels);
        for (int64_t q = range.first; q < range.last; ++q) {
            const RowBlock& b = p.blocks[q];
            for (int64_t i = 0; i < b.count; ++i) {
                widen(row_of(p.row_token[b.begin + i]), p.hidden, s.row);
                if (channels != nullptr) scale_row(s.channels, p.hidden, s.row);
                quantise(b, i, p.hidden, depth, in_groups, s.quantised - first * depth,
                         s.quantised_rows - first * scales_per_row(depth, in_groups));
            }
        }
    }
}

// What pack_frozen packed of block b, first_row being the first row of its range.
auto packed_frozen(const RowBlock& b, int64_t first_row, bool forward) const {
    if constexpr (kQuantised) {
        const int64_t depth = line_depth<FrozenT>(p.hidden_pad);
        const bool in_groups = forward && p.in_groups;
        return left_of_rows(b, p.hidden_pad, in_groups, s.quantised - first_row * depth,
                            s.quantised_rows - first_row * scales_per_row(depth, in_groups));
    } else {
        return static_cast<const T*>(s.packed + (b.begin - first_row) * p.hidden_pad);
    }
}
auto act_frozen(const RowBlock& b) const {
    if constexpr (kQuantised)
        return left_of_rows(b, p.inter_pad, p.in_groups, static_cast<const FrozenT*>(p.act_int8),
                            p.act_scales);
    else
        return static_cast<const T*>(act(b));
}
auto dpair_frozen(const RowBlock& b) const {
    if constexpr (kQuantised)
        return left_of_rows(b, p.parts * p.inter_pad, false, static_cast<const FrozenT*>(p.dpair_int8),
                            p.dpair_scales);
    else
        return static_cast<const T*>(dpair(b));
}

// Once per row, as every slab of columns reads them. Nothing to do where they are not wanted.
void quantise_act(const Chunk& chunk) const {
    if constexpr (kQuantised) {
        if (p.act_int8 == nullptr) return;
        each_row(chunk, [&](const RowBlock& b, int64_t i) {
            quantise_packed(b, i, act(b), p.inter_pad, false, p.in_groups, p.act_int8, p.act_scales);
        });
    }
}
// Gradients of gate and up, times their channels' scales, share a scale: their products with both
// matrices are one sum.
void quantise_dpair(const Chunk& chunk) const {
    if constexpr (kQuantised) {
        if (p.dx == nullptr) return;
        const int64_t e = p.groups[chunk.group].expert;
        memset(s.channels, 0, p.parts * p.inter_pad * sizeof(float));
        if (p.parts == 2) channel_scales(p.gate.at(e), s.channels);
        channel_scales(p.up.at(e), s.channels + (p.parts - 1) * p.inter_pad);
        each_row(chunk, [&](const RowBlock& b, int64_t i) {
            quantise_packed(b, i, dpair(b), p.parts * p.inter_pad, true, false, p.dpair_int8, p.dpair_scales);
        });
    }
}

static void scale_row(const float* scales, int64_t n, float* row) {
    for (int64_t j = 0; j < n; ++j) row[j] *= scales[j];
}

// Row i of a block: s.row, of which `count` elements are there, into packed rows of all blocks.
void quantise(const RowBlock& b, int64_t i, int64_t count, int64_t depth, bool in_groups, FrozenT* packed,
              RowScale* rows) const {
    constexpr int64_t line = 64 / static_cast<int64_t>(sizeof(FrozenT));
    for (int64_t j = count; j < depth; ++j) s.row[j] = 0.0f;
    rows += b.begin * scales_per_row(depth, in_groups) + i;
    packed += b.begin * depth + i * line;
    if (!in_groups) {
        *rows = quantise_row<line, Frozen<C>::kRaised>(s.row, depth, packed, b.count * line);
        return;
    }
    for (int64_t k = 0; k < depth; k += kSlice, rows += b.count)
        *rows = quantise_group(s.row + k, packed + k / line * b.count * line + k % line);
}

void quantise_packed(const RowBlock& b, int64_t i, T* from, int64_t count, bool scaled, bool in_groups,
                     void* to, RowScale* rows) const {
    for (int64_t k = 0; k < count; k += kLine) widen(packed_at(from, b, i, k), kLine, s.row + k);
    if (scaled) scale_row(s.channels, count, s.row);
    quantise(b, i, count, line_depth<FrozenT>(count), in_groups, static_cast<FrozenT*>(to), rows);
}

auto left_of_rows(const RowBlock& b, int64_t depth, bool in_groups, const FrozenT* packed,
                  const RowScale* rows) const {
    depth = line_depth<FrozenT>(depth);
    return QuantisedLeft<FrozenT>{packed + b.begin * depth, rows + b.begin * scales_per_row(depth, in_groups),
                                  in_groups};
}
