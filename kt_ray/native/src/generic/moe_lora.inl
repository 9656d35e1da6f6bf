// Members of Moe: the LoRA projections to rank r. Included inside the class.
//
// They run on the same micro-kernel as the frozen products. Where that multiplies bfloat16, an adapter's
// float32 value takes two columns, its rounding and the rounding of what that leaves: together 16 bits
// of mantissa, times activations that are bfloat16 anyway.

static constexpr int64_t kSplits = sizeof(T) == 2 ? 2 : 1;
static constexpr int64_t kMostColumns = kSplits * 2 * kMaxRank;  // of a projection

// One or two adapter matrices whose columns a projection's panels hold, one after the other.
struct Projected {
    const float* matrix[2];
    int64_t count;
    int64_t rank, depth;
    bool along_columns;  // [depth, rank], as every B; else [rank, depth], as every A

    int64_t columns() const { return count * rank; }
};

// to[i] = from[i] rounded (which 0), or what that leaves (which 1), for whole vectors of a buffer.
static void split(const float* from, int64_t n, int64_t which, float* to) {
    for (int64_t i = 0; i < n; i += kLanes) {
        const Vec v = vload(from + i);
        vstore(to + i, which == 0 ? v : v - vthrough<T>(v));
    }
}

// Columns [first, first + kColumns) for slices [begin, end).
void projection_panel(const Projected& w, int64_t first, int64_t begin, int64_t end, T* panel) const {
    alignas(64) float buffer[kLanes * kSlice];
    const int64_t columns = w.columns();
    for (int64_t slice = begin; slice < end; ++slice) {
        T* to = panel + (slice - begin) * slice_steps<C>() * step_size<T>();
        const int64_t k = slice * kSlice, n_depth = min_of(kSlice, w.depth - k);
        if (!w.along_columns) {
            for (int64_t half = 0; half < 2; ++half) {
                memset(buffer, 0, sizeof(buffer));
                for (int64_t n = 0; n < kLanes; ++n) {
                    const int64_t v = first + half * kLanes + n, which = v / columns, c = v % columns;
                    if (which >= kSplits) break;
                    const float* from = w.matrix[c / w.rank] + c % w.rank * w.depth + k;
                    float* to_row = buffer + n * kSlice;
                    if (n_depth == kSlice) {
                        split(from, kSlice, which, to_row);
                    } else {
                        memcpy(to_row, from, n_depth * sizeof(float));
                        split(to_row, kSlice, which, to_row);
                    }
                }
                place_rows<T>(buffer, to + half * kLanes * pack_of<T>());
            }
        } else {
            // The slice's rows of B lie together; copied, as whole vectors are read. What these write beyond
            // a matrix' columns, the next one's or the zeros overwrite.
            memcpy(s.split, w.matrix[0] + k * w.rank, n_depth * w.rank * sizeof(float));
            alignas(64) float rows[kSlice][kLanes + kColumns + kLanes];
            for (int64_t q = 0; q < kSlice; ++q) {
                float* row = rows[q] + kLanes - first;
                const int64_t there = q < n_depth ? kSplits * columns : 0;
                for (int64_t which = 0; which * columns < there; ++which)
                    for (int64_t c = 0; c < columns; c += kLanes) {
                        const int64_t v = which * columns + c;
                        if (v + kLanes > first && v < first + kColumns)
                            split(s.split + q * w.rank + c, kLanes, which, row + v);
                    }
                for (int64_t v = max_of(first, there); v < first + kColumns; v += kLanes)
                    vstore(row + v, vset1(0.0f));
            }
            for (int64_t q = 0; q < kSlice; q += pack_of<T>())
                place_step<T>(rows[q] + kLanes, kLanes + kColumns + kLanes, kColumns, q / pack_of<T>(), to);
        }
    }
}

// out(segment, matrix) gets scale * left times the columns of that matrix, packed; left_of(segment) is packed
// and w.depth deep, padded to slices.
template <class LeftOf, class Out>
void project(const Chunk& chunk, const Projected& w, float scale, const LeftOf& left_of,
             const Out& out) const {
    if (p.by_rows) return project_rows(chunk, w, scale, left_of, out);
    const int64_t slices = pieces(w.depth, kSlice), panels = pieces(kSplits * w.columns(), kColumns);
    const int64_t first_row = first_row_of(chunk);
    for (int64_t from = 0; from < slices; from += max_slices<C>()) {
        const int64_t to = min_of(slices, from + max_slices<C>());
        for (int64_t panel = 0; panel < panels; ++panel) {
            projection_panel(w, panel * kColumns, from, to, s.panel[0]);
            typename C::Ahead nothing;
            for (int64_t q = chunk.segment_begin; q < chunk.segment_end; ++q) {
                const Segment& g = p.segments[q];
                C::run(nothing, g.count, left_of(g) + from * kSlice * g.count, to - from, s.panel[0],
                       s.sums + (panel * kChunkRows + g.begin - first_row) * kColumns, from > 0, Touch{});
            }
        }
    }
    for (int64_t q = chunk.segment_begin; q < chunk.segment_end; ++q) {
        const Segment& g = p.segments[q];
        for (int64_t k = 0; k < g.count; ++k) {
            alignas(64) float sums[kMostColumns + kColumns];  // of the row, side by side
            for (int64_t panel = 0; panel < panels; ++panel)
                memcpy(sums + panel * kColumns,
                       s.sums + (panel * kChunkRows + g.begin - first_row + k) * kColumns,
                       kColumns * sizeof(float));
            for (int64_t m = 0; m < w.count; ++m) {
                float* to = out(g, m) + k * kRankLine;
                for (int64_t line = 0; line < w.rank; line += kRankLine, to += g.count * kRankLine) {
                    const float* from = sums + m * w.rank + line;
                    for (int64_t j = 0; j < kRankLine; j += kLanes) {
                        Vec v = vload(from + j);
                        if (kSplits == 2) v = v + vload(from + w.columns() + j);
                        vstore(to + j, scale * v);
                    }
                    for (int64_t j = w.rank - line; j < kRankLine; ++j) to[j] = 0.0f;
                }
            }
        }
    }
}

int64_t first_row_of(const Chunk& chunk) const { return p.segments[chunk.segment_begin].begin; }

// body(block, i) for the rows of a chunk: each is row i of its block.
template <class Body>
void each_row(const Chunk& chunk, const Body& body) const {
    for (int64_t q = chunk.segment_begin; q < chunk.segment_end; ++q) {
        const Segment& g = p.segments[q];
        const RowBlock& b = block_of(g);
        for (int64_t i = g.begin - b.begin, end = i + g.count; i < end; ++i) body(b, i);
    }
}

// Packs the rows of a chunk by segments; from(segment, i, k, line) writes elements [k, k + kLine) of row i.
template <class From>
void pack_chunk(const Chunk& chunk, int64_t depth, const From& from) const {
    for (int64_t q = chunk.segment_begin; q < chunk.segment_end; ++q) {
        const Segment& g = p.segments[q];
        T* base = s.packed + (g.begin - first_row_of(chunk)) * depth;
        for (int64_t i = 0; i < g.count; ++i)
            for (int64_t k = 0; k < depth; k += kLine) from(g, i, k, packed_at(base, g, i, k));
    }
}

// Zeroes dropped elements of a line; the scale of the others is left to the result.
void mask_line(const Segment& g, int64_t i, int64_t k, int64_t width, Projection projection, T* line) const {
    const uint32_t hash = p.row_hash[projection * p.rows + g.begin + i];
    for (int64_t j = 0; j < kLine && k + j < width; ++j)
        if (element_hash(hash, static_cast<uint32_t>(k + j)) < p.drop_below) line[j] = from_float<T>(0.0f);
}

void pack_masked_x(const Chunk& chunk, Projection projection) const {
    pack_chunk(chunk, p.hidden_pad, [&](const Segment& g, int64_t i, int64_t k, T* line) {
        pack_line(x_row(p.row_token[g.begin + i]) + k, line);
        if (p.row_hash != nullptr) mask_line(g, i, k, p.hidden, projection, line);
    });
}

// Whether each segment of a chunk is a block, so that what is packed by blocks is packed by segments.
bool in_whole_blocks(const Chunk& chunk) const {
    for (int64_t q = chunk.segment_begin; q < chunk.segment_end; ++q)
        if (block_of(p.segments[q]).count != p.segments[q].count) return false;
    return true;
}

float kept(const LoraView& lora) const {
    return p.row_hash == nullptr ? lora.scale : lora.scale * p.keep_scale;
}

auto packed_of(const Chunk& chunk, int64_t depth) const {
    return [this, first_row = first_row_of(chunk), depth](const Segment& g) -> const T* {
        return s.packed + (g.begin - first_row) * depth;
    };
}

// project() of rows of I that are packed by blocks, each at base_of(block); with A_down's mask if `masked`.
template <class BaseOf, class Out>
void project_packed(const Chunk& chunk, const Projected& w, float scale, const BaseOf& base_of, bool masked,
                    const Out& out) const {
    if (!masked && in_whole_blocks(chunk))
        return project(chunk, w, scale, [&](const Segment& g) { return base_of(block_of(g)); }, out);
    pack_chunk(chunk, p.inter_pad, [&](const Segment& g, int64_t i, int64_t k, T* line) {
        const RowBlock& b = block_of(g);
        memcpy(line, packed_at(base_of(b), b, g.begin - b.begin + i, k), kLine * sizeof(T));
        if (masked) mask_line(g, i, k, p.inter, kDown, line);
    });
    project(chunk, w, scale, packed_of(chunk, p.inter_pad), out);
}

const LoraView* lora_of(const Chunk& chunk, int64_t* expert) const {
    *expert = p.groups[chunk.group].expert;
    return lora_of(chunk.group);
}

void lora_in(int64_t task) const {
    int64_t e;
    const Chunk& chunk = p.chunks[task];
    const LoraView* lora = lora_of(chunk, &e);
    if (lora == nullptr) return;
    const int64_t r = lora->rank, at = e * r * p.hidden;
    const auto out = [&](const Segment& g, int64_t m) {
        return lora_in(g) + m * rank_lines(*lora) * g.count * kRankLine;
    };
    if (p.parts == 2 && p.row_hash == nullptr) {  // gate and up read the same x: one product
        pack_masked_x(chunk, kGate);
        return project(chunk, {{lora->gate_a + at, lora->up_a + at}, 2, r, p.hidden, false}, kept(*lora),
                       packed_of(chunk, p.hidden_pad), out);
    }
    for (int64_t m = 0; m < p.parts; ++m) {
        const bool gate = p.parts == 2 && m == 0;
        pack_masked_x(chunk, gate ? kGate : kUp);
        project(chunk, {{(gate ? lora->gate_a : lora->up_a) + at, nullptr}, 1, r, p.hidden, false},
                kept(*lora), packed_of(chunk, p.hidden_pad),
                [&](const Segment& g, int64_t) { return out(g, m); });
    }
}

void lora_mid(int64_t task) const {
    int64_t e;
    const Chunk& chunk = p.chunks[task];
    quantise_act(chunk);
    const LoraView* lora = lora_of(chunk, &e);
    if (lora == nullptr) return;
    const Projected w = {{lora->down_a + e * lora->rank * p.inter, nullptr}, 1, lora->rank, p.inter, false};
    project_packed(
        chunk, w, kept(*lora), [&](const RowBlock& b) { return act(b); }, p.row_hash != nullptr,
        [&](const Segment& g, int64_t) { return lora_mid(g); });
}

void lora_out(int64_t task) const {
    int64_t e;
    const Chunk& chunk = p.chunks[task];
    const LoraView* lora = lora_of(chunk, &e);
    if (lora == nullptr) return;
    pack_tokens(p.segments + chunk.segment_begin, p.segments + chunk.segment_end,
                [&](int64_t token) { return dy_row(token); });
    project(chunk, {{lora->down_b + e * lora->rank * p.hidden, nullptr}, 1, lora->rank, p.hidden, true},
            lora->scale, packed_of(chunk, p.hidden_pad),
            [&](const Segment& g, int64_t) { return lora_out(g); });
}

// Back through B_gate and B_up; and dw, whose parts are complete by now.
void dlora_in(int64_t task) const {
    const Chunk& chunk = p.chunks[task];
    const int64_t slabs = pieces(p.inter, kDwColumns);
    quantise_dpair(chunk);
    each_row(chunk, [&](const RowBlock& b, int64_t i) { finish_dw(b.begin + i, slabs, chunk); });
    int64_t e;
    const LoraView* lora = lora_of(chunk, &e);
    if (lora == nullptr) return;
    const int64_t at = e * p.inter * lora->rank;
    for (int64_t m = 0; m < p.parts; ++m)
        project_packed(
            chunk,
            {{(p.parts == 2 && m == 0 ? lora->gate_b : lora->up_b) + at, nullptr},
             1,
             lora->rank,
             p.inter,
             true},
            lora->scale, [&](const RowBlock& b) { return dpair(b) + m * p.inter_pad * b.count; }, false,
            [&](const Segment& g, int64_t) {
                return dlora_in(g) + m * rank_lines(*lora) * g.count * kRankLine;
            });
}

void finish_dw(int64_t row, int64_t slabs, const Chunk& chunk) const {
    float sum = 0.0f;
    for (int64_t slab = 0; slab < slabs; ++slab) sum += p.dw_parts[slab * p.rows + row];
    if (p.down_bias != nullptr) {
        const float* bias = p.down_bias + p.groups[chunk.group].expert * p.hidden;
        const float* dy = p.dy + p.row_token[row] * p.hidden;
        for (int64_t h = 0; h < p.hidden; ++h) sum += bias[h] * dy[h];
    }
    p.dw_rows[row] = sum;
}
