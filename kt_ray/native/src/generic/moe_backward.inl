// Members of Moe: backward of the experts' own path. Included inside the class.

void store_dy(int64_t task) const {
    const int64_t end = min_of(p.tokens, (task + 1) * kTokenChunk);
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
        [&](int64_t) { return range; }, [&](const RowBlock& b) { return packed_frozen(b, first_row); },
        [&](int64_t j, const RowBlock& b, Touch& touch) {
            const int64_t i = first + j * kColumns;
            for (int64_t part = 0; part < p.parts; ++part)
                for (int64_t k = 0; k < b.count; ++k) {
                    touch.add(packed_at(pair(b), b, k, part * p.inter_pad + i));
                    touch.add(packed_at(dpair(b), b, k, part * p.inter_pad + i));
                }
        },
        [&](int64_t j, const RowBlock& b, float* tile) {
            const int64_t i = first + j * kColumns, columns = min_of(kColumns, p.inter - i);
            if (const LoraView* lora = lora_of(b)) {
                if (expanded.is_new(j, b))
                    expand_columns(lora->down_a + e * lora->rank * p.inter + i, p.inter, columns, lora->rank,
                                   s.lora_panel);
                add_expansion(b, lora_out(b), lora->rank, s.lora_panel, i, columns, kDown, tile);
            }
            float* dw = p.dw_parts + i / kDwColumns * p.rows + b.begin;
            for_activation([&](auto kind) {
                for (int64_t k = 0; k < b.count; ++k) {
                    const float part = deactivate_row<decltype(kind)::value>(tile + k * kColumns, b, k, i);
                    dw[k] = i % kDwColumns == 0 ? part : dw[k] + part;
                }
            });
        });
}

// tile += mask * (packed left times the LoRA panel); [first, first + columns) are the masked features.
void add_expansion(const RowBlock& b, const float* left, int64_t rank, const float* panel, int64_t first,
                   int64_t columns, Projection projection, float* tile) const {
    if (p.row_hash == nullptr) {
        MicroF32::run(b.count, left, rank, panel, tile, true);
        return;
    }
    MicroF32::run(b.count, left, rank, panel, s.masked, false);
    for (int64_t k = 0; k < b.count; ++k) {
        float* from = s.masked + k * kColumns;
        drop(from, columns, first, b.begin + k, projection);
        for (int64_t j = 0; j < kColumns; ++j) tile[k * kColumns + j] += from[j];
    }
}

// From the unweighted gradient of act: weighted gradients of gate and up; act again, for the gradient
// of A_down. Returns <act, dact> over these columns. Padding comes out as zero: dact is zero there.
template <Activation A>
float deactivate_row(const float* dact, const RowBlock& b, int64_t k, int64_t i) const {
    constexpr bool gated = A != Activation::relu2;
    const ActivationSpec spec = p.activation;
    const Vec weight = vset1(p.row_weight[b.begin + k]);
    Vec product[2] = {vset1(0.0f), vset1(0.0f)};
    for (int64_t half = 0; half < 2; ++half) {
        const int64_t j = half * kLanes;
        if (i + j >= p.inter_pad) break;
        const Vec d = vload(dact + j);
        const Vec g = gated ? vload(packed_at(pair(b), b, k, i + j)) : vset1(0.0f);
        const Vec u = vload(packed_at(pair(b), b, k, (gated ? p.inter_pad : 0) + i + j));
        Vec dg, du;
        const Vec a = vthrough<S>(deactivate<A>(spec, g, u, weight * d, &dg, &du));
        product[half] = a * d;
        vstore(packed_at(act(b), b, k, i + j), a);
        if (gated) vstore(packed_at(dpair(b), b, k, i + j), vthrough<S>(dg));
        vstore(packed_at(dpair(b), b, k, (gated ? p.inter_pad : 0) + i + j), vthrough<S>(du));
    }
    if (i + kColumns >= p.inter)
        for (int64_t part = 0; part < p.parts; ++part)
            pad_packed(dpair(b), b, k, part * p.inter_pad + min_of(i + kColumns, p.inter_pad),
                       (part + 1) * p.inter_pad);
    alignas(64) float sum[kLanes];
    vstore(sum, product[0] + product[1]);
    for (int64_t half = kLanes / 2; half > 0; half /= 2)
        for (int64_t j = 0; j < half; ++j) sum[j] += sum[j + half];
    return sum[0];
}

// dx for a slab of H, over all experts in order.
void dx(int64_t task) const {
    const int64_t first = task * p.hidden_slab, last = min_of(p.hidden, first + p.hidden_slab);
    for (int64_t t = 0; t < p.tokens; ++t)
        memset(p.dx + t * p.hidden + first, 0, (last - first) * sizeof(float));
    const int64_t panels = pieces(last - first, kColumns), part_slices = p.inter_pad / kSlice;
    Expanded expanded;
    sweep(
        p.num_spans * panels, p.parts * part_slices,
        [&](int64_t j) {
            const int64_t e = p.spans[j / panels].expert, h = first + j % panels * kColumns;
            if (p.parts == 1) return Source{{make_part(p.up.at(e), true, h, 0, 2, 0), Part()}, 1};
            return Source{{make_part(p.gate.at(e), true, h, 0, 2, 0),
                           make_part(p.up.at(e), true, h, 0, 2, part_slices)},
                          2};
        },
        [&](int64_t j) { return blocks_of(p.spans[j / panels]); },
        [&](const RowBlock& b) { return dpair_frozen(b); },
        [&](int64_t j, const RowBlock& b, Touch& touch) {
            touch_rows(p.dx + first + j % panels * kColumns, b, touch);
        },
        [&](int64_t j, const RowBlock& b, float* tile) {
            const int64_t h = first + j % panels * kColumns, columns = min_of(kColumns, p.hidden - h);
            if (const LoraView* lora = lora_of(b)) {
                const int64_t rank = lora->rank, at = p.spans[j / panels].expert * rank * p.hidden + h;
                float* up_panel = s.lora_panel + p.rank_pad * kColumns;
                if (expanded.is_new(j, b)) {
                    if (p.parts == 2)
                        expand_columns(lora->gate_a + at, p.hidden, columns, rank, s.lora_panel);
                    expand_columns(lora->up_a + at, p.hidden, columns, rank, up_panel);
                }
                const float* left = dlora_in(b);
                if (p.parts == 2) {
                    add_expansion(b, left, rank, s.lora_panel, h, columns, kGate, tile);
                    left += rank_lines(*lora) * b.count * kRankLine;
                }
                add_expansion(b, left, rank, up_panel, h, columns, kUp, tile);
            }
            for (int64_t k = 0; k < b.count; ++k)
                scatter(p.dx + p.row_token[b.begin + k] * p.hidden + h, tile + k * kColumns, 1.0f, columns);
        });
}
