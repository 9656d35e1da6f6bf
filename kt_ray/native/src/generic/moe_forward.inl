// Members of Moe: forward. Included inside the class.

void store_x(int64_t task) const {
    const int64_t end = min_of(p.tokens, (task + 1) * kTokenChunk);
    clear(task * kTokenChunk, end, p.y);
    for (int64_t t = task * kTokenChunk; t < end; ++t) {
        S* kept = static_cast<S*>(p.x) + t * p.hidden_pad;
        if (p.x_in_bf16)
            store_row(static_cast<const Bf16*>(p.x_in) + t * p.hidden, kept);
        else
            store_row(static_cast<const float*>(p.x_in) + t * p.hidden, kept);
    }
}

// Zeros in tokens [first, last) of y or dx, whole pages of it: slab by slab, all threads would meet at every
// page that the system has yet to provide.
void clear(int64_t first, int64_t last, float* table) const {
    memset(table + first * p.hidden, 0, (last - first) * p.hidden * sizeof(float));
}

template <class From>
void store_row(const From* from, S* to) const {
    for (int64_t j = 0; j < p.hidden; ++j) to[j] = from_float<S>(to_float(from[j]));
    for (int64_t j = p.hidden; j < p.hidden_pad; ++j) to[j] = from_float<S>(0.0f);
}

// Packs the rows of `table` (x or dy in S) that a range of blocks or segments names, into scratch.
template <class Rows, class RowOf>
void pack_tokens(const Rows* first, const Rows* last, const RowOf& row_of) const {
    for (const Rows* b = first; b < last; ++b)
        pack(
            *b, p.hidden_pad, [&](int64_t i) { return row_of(p.row_token[b->begin + i]); },
            s.packed + (b->begin - first->begin) * p.hidden_pad);
}

// Whose adapter the LoRA panel holds: it is expanded once for an item of a sweep and a group of rows.
struct Expanded {
    int64_t item = -1, group = -1;

    bool holds(int64_t j, const Segment& g) const { return j == item && g.group == group; }
    bool is_new(int64_t j, const Segment& g) {
        const bool other = !holds(j, g);
        item = j;
        group = g.group;
        return other;
    }
};

// panel[q][n] = b[n][q] for a half panel: the rows of a [out, rank] matrix as columns. Ranks beyond the last
// get what lies there: the products stop before them.
void expand_rows(const float* b, int64_t count, int64_t rank, float* half) const {
    float* rows = s.split;  // copied, as the transposition reads whole vectors
    memcpy(rows, b, count * rank * sizeof(float));
    memset(rows + count * rank, 0, ((kLanes - count) * rank + kLanes) * sizeof(float));
    for (int64_t q = 0; q < rank; q += kLanes) transpose_block(rows + q, rank, half + q * kColumns, kColumns);
}

// The same for a whole panel of `count` columns.
void expand_rows_of_panel(const float* b, int64_t count, int64_t rank, float* panel) const {
    expand_rows(b, min_of(kLanes, count), rank, panel);
    expand_rows(b + kLanes * rank, max_of(0, count - kLanes), rank, panel + kLanes);
}

// panel[q][n] = a[q][n]: columns of a [rank, in] matrix.
static void expand_columns(const float* a, int64_t ld, int64_t count, int64_t rank, float* panel) {
    for (int64_t q = 0; q < rank; ++q, panel += kColumns) {
        memcpy(panel, a + q * ld, count * sizeof(float));
        for (int64_t n = count; n < kColumns; ++n) panel[n] = 0.0f;
    }
}

// gate, up and act of the rows of a span for a slab of I.
void gate_up(int64_t task) const {
    const int64_t slabs = pieces(p.inter, p.inter_slab);
    const Span& span = p.spans[task / slabs];
    const int64_t first = task % slabs * p.inter_slab, last = min_of(p.inter, first + p.inter_slab);
    const BlockRange range = blocks_of(span);
    const int64_t first_row = p.blocks[range.first].begin, e = span.expert;
    const bool gated = p.parts == 2;
    const int64_t width = gated ? kLanes : kColumns;
    const Matrix gate = gated ? p.gate.at(e) : Matrix(), up = p.up.at(e);
    pack_frozen(range, [&](int64_t token) { return x_row(token); }, nullptr);
    Expanded expanded;
    sweep(
        pieces(last - first, width), p.hidden_pad / kSlice,
        [&](int64_t j) {
            const int64_t i = first + j * width;
            if (!gated) return Source{{make_part(up, false, i, 0, 2, 0), Part()}, 1};
            return Source{{make_part(gate, false, i, 0, 1, 0), make_part(up, false, i, 1, 1, 0)}, 2};
        },
        [&](int64_t) { return range; }, [&](const RowBlock& b) { return packed_frozen(b, first_row, true); },
        [&](int64_t j, const RowBlock& b, Touch& touch) {
            const int64_t i = first + j * width;
            each_adapter(b, [&](const Segment& g, const LoraView& lora) {
                if (expanded.holds(j, g)) return;
                const int64_t at = (e * p.inter + i) * lora.rank,
                              count = min_of(width, p.inter - i) * lora.rank;
                if (gated) touch_rows_of(lora.gate_b + at, count, touch);
                touch_rows_of(lora.up_b + at, count, touch);
            });
            if (i % kLine != 0) return;  // two panels share a line
            for (int64_t k = 0; k < b.count; ++k) touch.add(packed_at(act(b), b, k, i));
            for (int64_t part = 0; p.pair != nullptr && part < p.parts; ++part)
                for (int64_t k = 0; k < b.count; ++k)
                    touch.add(packed_at(pair(b), b, k, part * p.inter_pad + i));
        },
        [&](int64_t j, const RowBlock& b, float* tile) {
            const int64_t i = first + j * width, columns = min_of(width, p.inter - i);
            each_adapter(b, [&](const Segment& g, const LoraView& lora) {
                if (expanded.is_new(j, g)) expand_pair(lora, e, i, columns);
                const int64_t up_piece = gated ? rank_lines(lora) * g.count * kRankLine : 0;
                const float* left = lora_in(g);
                MicroF32::run_two(g.count, left, left + up_piece, lora.rank, s.lora_panel,
                                  rows_of(g, b, tile));
            });
            add_bias(tile, b.count, e, i, columns);
            for_activation([&](auto kind) { activate_block<decltype(kind)::value>(tile, b, i); });
        });
}

// The rows of a segment in the tile of its block.
static float* rows_of(const Segment& g, const RowBlock& b, float* tile) {
    return tile + (g.begin - b.begin) * kColumns;
}

void expand_pair(const LoraView& lora, int64_t e, int64_t i, int64_t columns) const {
    const int64_t at = (e * p.inter + i) * lora.rank;
    if (p.parts == 2) {
        expand_rows(lora.gate_b + at, columns, lora.rank, s.lora_panel);
        expand_rows(lora.up_b + at, columns, lora.rank, s.lora_panel + kLanes);
    } else {
        expand_rows_of_panel(lora.up_b + at, columns, lora.rank, s.lora_panel);
    }
}

void add_bias(float* tile, int64_t rows, int64_t e, int64_t i, int64_t columns) const {
    if (p.gate_bias == nullptr && p.up_bias == nullptr) return;
    const int64_t up_at = p.parts == 2 ? kLanes : 0;
    for (int64_t k = 0; k < rows; ++k)
        for (int64_t j = 0; j < columns; ++j) {
            if (p.gate_bias != nullptr) tile[k * kColumns + j] += p.gate_bias[e * p.inter + i + j];
            if (p.up_bias != nullptr) tile[k * kColumns + up_at + j] += p.up_bias[e * p.inter + i + j];
        }
}

template <Activation A>
struct Kind {
    static constexpr Activation value = A;
};

template <class Body>
void for_activation(const Body& body) const {
    switch (p.activation.kind) {
        case Activation::silu:
            return body(Kind<Activation::silu>());
        case Activation::gelu_tanh:
            return body(Kind<Activation::gelu_tanh>());
        case Activation::swiglu_oai:
            return body(Kind<Activation::swiglu_oai>());
        case Activation::relu2:
            return body(Kind<Activation::relu2>());
    }
}

// act from the stored gate and up, so that keeping or recomputing them is the same. Columns beyond I
// come out as zero, which the padding of act must be.
template <Activation A>
void activate_block(const float* tile, const RowBlock& b, int64_t i) const {
    constexpr bool gated = A != Activation::relu2;
    constexpr int64_t width = gated ? kLanes : kColumns;
    const ActivationSpec spec = p.activation;
    const int64_t count = b.count;
    for (int64_t j = 0; j < width; j += kLanes) {
        const float* from = tile + j;
        T* to = packed_at(act(b), b, 0, i + j);
        if (p.pair == nullptr) {
            for (int64_t k = 0; k < count; ++k, from += kColumns, to += kLine) {
                keep_awake(k);
                const Vec g = vthrough<S>(vload(from));
                const Vec u = gated ? vthrough<S>(vload(from + kLanes)) : g;
                store_rounded(to, activate<A>(spec, g, u));
            }
            continue;
        }
        S* to_g = packed_at(pair(b), b, 0, i + j);
        S* to_u = gated ? packed_at(pair(b), b, 0, p.inter_pad + i) : to_g;
        for (int64_t k = 0; k < count; ++k, from += kColumns, to += kLine) {
            keep_awake(k);
            const Vec raw_g = vload(from), raw_u = gated ? vload(from + kLanes) : raw_g;
            const Vec g = vthrough<S>(raw_g), u = vthrough<S>(raw_u);
            vstore(to_g + k * kNextRow<S>, raw_g);
            if (gated) vstore(to_u + k * kNextRow<S>, raw_u);
            store_rounded(to, activate<A>(spec, g, u));
        }
    }
    const int64_t end = i + width;
    if (end < p.inter) return;
    for (int64_t k = 0; k < count; ++k) {
        pad_packed(act(b), b, k, end, p.inter_pad);
        for (int64_t part = 0; p.pair != nullptr && part < p.parts; ++part)
            pad_packed(pair(b), b, k, part * p.inter_pad + end, (part + 1) * p.inter_pad);
    }
}

// Zeros in columns [from, to) of row k.
template <class Element>
static void pad_packed(Element* base, const RowBlock& b, int64_t k, int64_t from, int64_t to) {
    for (int64_t j = from; j < to; ++j) *packed_at(base, b, k, j) = from_float<Element>(0.0f);
}

// y for a slab of H, from the experts of a run in order.
void down(int64_t index) const {
    const ScatterTask task = scatter_task(p, index);
    const int64_t first = task.slab * p.hidden_slab, last = min_of(p.hidden, first + p.hidden_slab);
    const Span* const spans = p.spans + first_span(p, task.run);
    const int64_t count = p.spans + first_span(p, task.run + 1) - spans;
    const int64_t panels = pieces(last - first, kColumns);
    Expanded expanded;
    sweep(
        count * panels, p.inter_pad / kSlice,
        [&](int64_t j) {
            const Matrix w = p.down.at(spans[j / panels].expert);
            return Source{{make_part(w, false, first + j % panels * kColumns, 0, 2, 0), Part()}, 1};
        },
        [&](int64_t j) { return blocks_of(spans[j / panels]); },
        [&](const RowBlock& b) { return act_frozen(b); },
        [&](int64_t j, const RowBlock& b, Touch& touch) {
            const int64_t h = first + j % panels * kColumns;
            each_adapter(b, [&](const Segment& g, const LoraView& lora) {
                if (!expanded.holds(j, g))
                    touch_rows_of(lora.down_b + (spans[j / panels].expert * p.hidden + h) * lora.rank,
                                  min_of(kColumns, p.hidden - h) * lora.rank, touch);
            });
            touch_rows(p.y + h, b, touch);
        },
        [&](int64_t j, const RowBlock& b, float* tile) {
            const int64_t h = first + j % panels * kColumns, columns = min_of(kColumns, p.hidden - h);
            const int64_t e = spans[j / panels].expert;
            each_adapter(b, [&](const Segment& g, const LoraView& lora) {
                if (expanded.is_new(j, g))
                    expand_rows_of_panel(lora.down_b + (e * p.hidden + h) * lora.rank, columns, lora.rank,
                                         s.lora_panel);
                MicroF32::run(g.count, lora_mid(g), lora.rank, s.lora_panel, rows_of(g, b, tile), true);
            });
            if (p.down_bias != nullptr)
                for (int64_t k = 0; k < b.count; ++k)
                    for (int64_t c = 0; c < columns; ++c)
                        tile[k * kColumns + c] += p.down_bias[e * p.hidden + h + c];
            scatter(b, tile, p.row_weight + b.begin, columns, p.y + h);
        });
}

// What an expansion will read of an adapter: lines that nothing else has fetched. As far as there is room
// beside the rows' own.
static void touch_rows_of(const float* b, int64_t count, Touch& touch) {
    constexpr int64_t kRoom = C::Micro::kMaxRows * kTouchLines / 2, kFloats = 64 / sizeof(float);
    for (int64_t i = 0; i < count && touch.count < kRoom; i += kFloats) touch.add(b + i);
}
static void touch_columns_of(const float* a, int64_t ld, int64_t count, int64_t rank, Touch& touch) {
    for (int64_t q = 0; q < rank; ++q) touch_rows_of(a + q * ld, count, touch);
}

// The rows of y or dx that a block will be added to: far apart, so no hardware prefetcher finds them.
void touch_rows(const float* column, const RowBlock& b, Touch& touch) const {
    for (int64_t k = 0; k < b.count; ++k) {
        const char* row = reinterpret_cast<const char*>(column + p.row_token[b.begin + k] * p.hidden);
        for (int64_t byte = 0; byte < kColumns * 4; byte += 64) touch.add(row + byte);
    }
}

// Adds the rows of a tile to their tokens' rows of y or dx, times their weights if there are any.
void scatter(const RowBlock& b, const float* tile, const float* weights, int64_t columns,
             float* column) const {
    const int32_t* token = p.row_token + b.begin;
    for (int64_t k = 0; k < b.count; ++k, tile += kColumns) {
        keep_awake(k);
        float* to = column + token[k] * p.hidden;
        const float weight = weights == nullptr ? 1.0f : weights[k];
        if (columns == kColumns)
            for (int64_t j = 0; j < kColumns; j += kLanes)
                vstore(to + j, vload(to + j) + weight * vload(tile + j));
        else
            for (int64_t j = 0; j < columns; ++j) to[j] += weight * tile[j];
    }
}
