// Members of Moe: backward of the experts' own path. Included inside the class.

void store_dy(int64_t task) const {
    const int64_t end = min_of(p.tokens, (task + 1) * kTokenChunk);
    if (p.dx != nullptr) clear(task * kTokenChunk, end, p.dx);
    for (int64_t t = task * kTokenChunk; t < end; ++t)
        store_row(p.dy + t * p.hidden, static_cast<S*>(p.dy_stored) + t * p.hidden_pad);
}

// Gradients of gate and up of the rows of a span for a slab of I, and that slab's parts of dw.
void dact(int64_t task) const {
    const int64_t slabs = pieces(p.inter, p.inter_slab);
    const Span& span = p.spans[task / slabs];
    const int64_t first = task % slabs * p.inter_slab, last = min_of(p.inter, first + p.inter_slab);
    const BlockRange range = blocks_of(span);
    const int64_t first_row = p.blocks[range.first].begin, e = span.expert;
    const Matrix w = p.down.at(e);
    pack_frozen(range, [&](int64_t token) { return dy_row(token); }, &w);
    Expanded expanded;
    sweep(
        pieces(last - first, kColumns), p.hidden_pad / kSlice,
        [&](int64_t j) { return Source{{make_part(w, true, first + j * kColumns, 0, 2, 0), Part()}, 1}; },
        [&](int64_t) { return range; }, [&](const RowBlock& b) { return packed_frozen(b, first_row, false); },
        [&](int64_t j, const RowBlock& b, Touch& touch) {
            const int64_t i = first + j * kColumns;
            each_adapter(b, [&](const Segment& g, const LoraView& lora) {
                if (!expanded.holds(j, g))
                    touch_columns_of(lora.down_a + e * lora.rank * p.inter + i, p.inter,
                                     min_of(kColumns, p.inter - i), lora.rank, touch);
            });
            for (int64_t part = 0; part < p.parts; ++part)
                for (int64_t k = 0; k < b.count; ++k) {
                    touch.add(packed_at(pair(b), b, k, part * p.inter_pad + i));
                    touch.add(packed_at(dpair(b), b, k, part * p.inter_pad + i));
                }
        },
        [&](int64_t j, const RowBlock& b, float* tile) {
            const int64_t i = first + j * kColumns, columns = min_of(kColumns, p.inter - i);
            each_adapter(b, [&](const Segment& g, const LoraView& lora) {
                if (expanded.is_new(j, g))
                    expand_columns(lora.down_a + e * lora.rank * p.inter + i, p.inter, columns, lora.rank,
                                   s.lora_panel);
                add_expansion(g, lora_out(g), lora.rank, s.lora_panel, i, columns, kDown,
                              rows_of(g, b, tile));
            });
            float* dw = p.dw_parts + i / kDwColumns * p.rows + b.begin;
            for_activation([&](auto kind) { deactivate_block<decltype(kind)::value>(tile, b, i, dw); });
        });
}

// tile += mask * (packed left times the LoRA panel); [first, first + columns) are the masked features.
void add_expansion(const Segment& g, const float* left, int64_t rank, const float* panel, int64_t first,
                   int64_t columns, Projection projection, float* tile) const {
    if (p.row_hash == nullptr) {
        MicroF32::run(g.count, left, rank, panel, tile, true);
        return;
    }
    MicroF32::run(g.count, left, rank, panel, s.masked, false);
    for (int64_t k = 0; k < g.count; ++k) {
        float* from = s.masked + k * kColumns;
        drop(from, columns, first, g.begin + k, projection);
        for (int64_t j = 0; j < kColumns; ++j) tile[k * kColumns + j] += from[j];
    }
}

// From the unweighted gradient of act: weighted gradients of gate and up; act again, for the gradient
// of A_down; and <act, dact> over these columns to dw. Padding comes out as zero: dact is zero there.
template <Activation A>
void deactivate_block(const float* tile, const RowBlock& b, int64_t i, float* dw) const {
    constexpr bool gated = A != Activation::relu2;
    const ActivationSpec spec = p.activation;
    const int64_t count = b.count, up = gated ? p.inter_pad : 0;
    const int64_t halves = i + kLanes < p.inter_pad ? 2 : 1;
    const float* weight = p.row_weight + b.begin;
    Vec products[C::Micro::kMaxRows];
    for (int64_t half = 0; half < halves; ++half) {
        const int64_t column = i + half * kLanes;
        const S* from_g = packed_at(pair(b), b, 0, column);
        const S* from_u = packed_at(pair(b), b, 0, up + column);
        T* to = packed_at(act(b), b, 0, column);
        T* to_g = packed_at(dpair(b), b, 0, column);
        T* to_u = packed_at(dpair(b), b, 0, up + column);
        for (int64_t k = 0; k < count; ++k) {
            keep_awake(k);
            const Vec d = vload(tile + k * kColumns + half * kLanes);
            const Vec g = gated ? vload(from_g + k * kNextRow<S>) : vset1(0.0f);
            const Vec u = vload(from_u + k * kNextRow<S>);
            Vec dg, du;
            const Vec raw = deactivate<A>(spec, g, u, vset1(weight[k]) * d, &dg, &du);
            store_rounded(to + k * kLine, raw);
            if (gated) store_rounded(to_g + k * kLine, dg);
            store_rounded(to_u + k * kLine, du);
            const Vec product = vthrough<S>(raw) * d;
            products[k] = half == 0 ? product : products[k] + product;
        }
    }
    for (int64_t k = 0; k < count; ++k) {
        const float part = vsum(halves == 2 ? products[k] : products[k] + vset1(0.0f));
        dw[k] = i % kDwColumns == 0 ? part : dw[k] + part;
    }
    if (i + kColumns < p.inter) return;
    for (int64_t k = 0; k < count; ++k)
        for (int64_t part = 0; part < p.parts; ++part)
            pad_packed(dpair(b), b, k, part * p.inter_pad + min_of(i + kColumns, p.inter_pad),
                       (part + 1) * p.inter_pad);
}

// dx for a slab of H, from the experts of a run in order.
void dx(int64_t index) const {
    const ScatterTask task = scatter_task(p, index);
    const int64_t first = task.slab * p.hidden_slab, last = min_of(p.hidden, first + p.hidden_slab);
    const Span* const spans = p.spans + first_span(p, task.run);
    const int64_t count = p.spans + first_span(p, task.run + 1) - spans;
    const int64_t panels = pieces(last - first, kColumns), part_slices = p.inter_pad / kSlice;
    Expanded expanded;
    sweep(
        count * panels, p.parts * part_slices,
        [&](int64_t j) {
            const int64_t e = spans[j / panels].expert, h = first + j % panels * kColumns;
            if (p.parts == 1) return Source{{make_part(p.up.at(e), true, h, 0, 2, 0), Part()}, 1};
            return Source{{make_part(p.gate.at(e), true, h, 0, 2, 0),
                           make_part(p.up.at(e), true, h, 0, 2, part_slices)},
                          2};
        },
        [&](int64_t j) { return blocks_of(spans[j / panels]); },
        [&](const RowBlock& b) { return dpair_frozen(b); },
        [&](int64_t j, const RowBlock& b, Touch& touch) {
            const int64_t h = first + j % panels * kColumns, columns = min_of(kColumns, p.hidden - h);
            each_adapter(b, [&](const Segment& g, const LoraView& lora) {
                if (expanded.holds(j, g)) return;
                const int64_t at = spans[j / panels].expert * lora.rank * p.hidden + h;
                if (p.parts == 2) touch_columns_of(lora.gate_a + at, p.hidden, columns, lora.rank, touch);
                touch_columns_of(lora.up_a + at, p.hidden, columns, lora.rank, touch);
            });
            touch_rows(p.dx + h, b, touch);
        },
        [&](int64_t j, const RowBlock& b, float* tile) {
            const int64_t h = first + j % panels * kColumns, columns = min_of(kColumns, p.hidden - h);
            each_adapter(b, [&](const Segment& g, const LoraView& lora) {
                const int64_t rank = lora.rank, at = spans[j / panels].expert * rank * p.hidden + h;
                float* up_panel = s.lora_panel + p.rank_pad * kColumns;
                if (expanded.is_new(j, g)) {
                    if (p.parts == 2) expand_columns(lora.gate_a + at, p.hidden, columns, rank, s.lora_panel);
                    expand_columns(lora.up_a + at, p.hidden, columns, rank, up_panel);
                }
                float* rows = rows_of(g, b, tile);
                const float* left = dlora_in(g);
                if (p.parts == 2) {
                    add_expansion(g, left, rank, s.lora_panel, h, columns, kGate, rows);
                    left += rank_lines(lora) * g.count * kRankLine;
                }
                add_expansion(g, left, rank, up_panel, h, columns, kUp, rows);
            });
            scatter(b, tile, nullptr, columns, p.dx + h);
        });
}
