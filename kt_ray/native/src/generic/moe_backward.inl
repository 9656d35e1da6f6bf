// Members of Moe: backward of the experts' own path. Included inside the class.

void convert_dy(int64_t task) const {
    const int64_t end = min_of(p.tokens, (task + 1) * kTokenChunk);
    for (int64_t t = task * kTokenChunk; t < end; ++t) {
        const float* from = p.dy + t * p.hidden;
        T* to = static_cast<T*>(p.dy_compute) + t * p.hidden_stride;
        for (int64_t j = 0; j < p.hidden; ++j) to[j] = from_float<T>(through<S>(from[j]));
        for (int64_t j = p.hidden; j < p.hidden_stride; ++j) to[j] = from_float<T>(0.0f);
    }
}

// Gradients of gate and up of one expert for a slab of I, and that slab's part of dw.
void dact(int64_t task) const {
    const int64_t slabs = pieces(p.inter, kSlab);
    const ExpertRows& expert = p.expert_rows[task / slabs];
    const int64_t i_begin = task % slabs * kSlab, i_end = min_of(p.inter, i_begin + kSlab);
    const int64_t steps = pieces(p.hidden, M::kPack);
    const S* w = matrix(p.down, expert.expert);
    float* dw = p.dw_parts + task % slabs * p.rows;
    for (int64_t row = expert.begin; row < expert.end; ++row) dw[row] = 0.0f;
    for (int64_t i = i_begin; i < i_end; i += kColumns) {
        const int64_t columns = min_of(kColumns, i_end - i);
        panel_from_columns<M>(w + i, p.inter, columns, p.hidden, steps, s.panel);
        Prefetch next;
        next.add_columns(w + i + kColumns, min_of(kColumns, p.inter - i - kColumns), p.hidden, p.inter);
        for (int64_t g = expert.group_begin; g < expert.group_end; ++g) {
            const Group& group = p.groups[g];
            const LoraView* lora = group.adapter < 0 ? nullptr : p.lora + group.adapter;
            if (lora != nullptr)
                panel_from_columns<MicroF32>(lora->down_a + expert.expert * lora->rank * p.inter + i, p.inter,
                                             columns, lora->rank, lora->rank, s.lora_panel);
            row_blocks(group.begin, group.end, [&](int64_t row, int count) {
                multiply<M>(
                    count, [&](int k) { return dy_row(p.row_token[row + k]); }, steps, s.panel, s.tile, false,
                    &next);
                if (lora != nullptr)
                    add_lora(
                        count, row, lora->rank, s.lora_panel, [&](int k) { return lora_out_row(row + k); }, i,
                        columns, kDown);
                for (int k = 0; k < count; ++k)
                    dw[row + k] += deactivate(s.tile + k * kColumns, row + k, i, columns);
            });
        }
    }
}

// tile += mask * (rows times the LoRA panel); [first, first + columns) are the masked features.
template <class Rows>
void add_lora(int count, int64_t row, int64_t depth, const float* panel, const Rows& rows, int64_t first,
              int64_t columns, Projection projection) const {
    if (p.row_hash == nullptr) {
        multiply<MicroF32>(count, rows, depth, panel, s.tile, true);
        return;
    }
    multiply<MicroF32>(count, rows, depth, panel, s.tile2, false);
    for (int k = 0; k < count; ++k) {
        float* from = s.tile2 + k * kColumns;
        float* to = s.tile + k * kColumns;
        drop(from, columns, first, row + k, projection);
        for (int64_t j = 0; j < kColumns; ++j) to[j] += from[j];
    }
}

// From the unweighted gradient of act: weighted gradients of gate and up; act again, for the
// gradient of A_down. Returns <act, dact> over these columns.
float deactivate(const float* dact, int64_t row, int64_t i, int64_t columns) const {
    S gate[kColumns] = {}, up[kColumns] = {};
    T act[kColumns], dgate[kColumns], dup[kColumns];
    float product[kColumns];
    memcpy(gate, pair_row(row) + i, columns * sizeof(S));
    memcpy(up, pair_row(row) + p.inter_even + i, columns * sizeof(S));
    const float weight = p.row_weight[row];
    for (int64_t j = 0; j < kColumns; ++j) {
        const float g = to_float(gate[j]), u = to_float(up[j]);
        const float sig = sigmoid(g), silu = g * sig;
        const float a = through<S>(silu * u), d = weight * dact[j];
        product[j] = a * dact[j];
        act[j] = from_float<T>(a);
        dup[j] = from_float<T>(through<S>(d * silu));
        dgate[j] = from_float<T>(through<S>(d * u * (sig * (1.0f + g * (1.0f - sig)))));
    }
    memcpy(act_row(row) + i, act, columns * sizeof(T));
    memcpy(dpair_row(row) + i, dgate, columns * sizeof(T));
    memcpy(dpair_row(row) + p.inter_even + i, dup, columns * sizeof(T));
    pad(dpair_row(row), i + columns);
    pad(dpair_row(row) + p.inter_even, i + columns);
    for (int64_t half = kColumns / 2; half > 0; half /= 2)
        for (int64_t j = 0; j < half; ++j) product[j] += product[j + half];
    return product[0];
}

// dx for a slab of H, over all experts in order.
void dx(int64_t task) const {
    const int64_t h_begin = task * p.slab_columns, h_end = min_of(p.hidden, h_begin + p.slab_columns);
    for (int64_t t = 0; t < p.tokens; ++t)
        memset(p.dx + t * p.hidden + h_begin, 0, (h_end - h_begin) * sizeof(float));
    const int64_t steps = p.inter_even / M::kPack;
    for (int64_t e = 0; e < p.num_expert_rows; ++e) {
        const ExpertRows& expert = p.expert_rows[e];
        const S* gate = matrix(p.gate, expert.expert);
        const S* up = matrix(p.up, expert.expert);
        for (int64_t h = h_begin; h < h_end; h += kColumns) {
            const int64_t columns = min_of(kColumns, h_end - h);
            panel_from_columns<M>(gate + h, p.hidden, columns, p.inter, steps, s.panel);
            panel_from_columns<M>(up + h, p.hidden, columns, p.inter, steps,
                                  s.panel + steps * step_size<M>());
            Prefetch next = next_columns(e, h, h_begin, h_end);
            for (int64_t g = expert.group_begin; g < expert.group_end; ++g) {
                const Group& group = p.groups[g];
                const LoraView* lora = group.adapter < 0 ? nullptr : p.lora + group.adapter;
                const int64_t r = lora == nullptr ? 0 : lora->rank;
                float* up_panel = s.lora_panel + r * kColumns;
                if (lora != nullptr) {
                    const int64_t at = expert.expert * r * p.hidden + h;
                    panel_from_columns<MicroF32>(lora->gate_a + at, p.hidden, columns, r, r, s.lora_panel);
                    panel_from_columns<MicroF32>(lora->up_a + at, p.hidden, columns, r, r, up_panel);
                }
                row_blocks(group.begin, group.end, [&](int64_t row, int count) {
                    multiply<M>(
                        count, [&](int k) { return dpair_row(row + k); }, 2 * steps, s.panel, s.tile, false,
                        &next);
                    if (lora != nullptr) {
                        add_lora(
                            count, row, r, s.lora_panel, [&](int k) { return dlora_in_row(row + k); }, h,
                            columns, kGate);
                        add_lora(
                            count, row, r, up_panel, [&](int k) { return dlora_in_row(row + k) + r; }, h,
                            columns, kUp);
                    }
                    for (int k = 0; k < count; ++k)
                        scatter(p.dx + p.row_token[row + k] * p.hidden + h, s.tile + k * kColumns, 1.0f,
                                columns);
                });
            }
        }
    }
}

// The panel of gate and up after columns h of expert e: the slab's next, or the next expert's first.
Prefetch next_columns(int64_t e, int64_t h, int64_t h_begin, int64_t h_end) const {
    Prefetch next;
    h += kColumns;
    if (h >= h_end) {
        h = h_begin;
        ++e;
    }
    if (e < p.num_expert_rows) {
        const int64_t expert = p.expert_rows[e].expert, columns = min_of(kColumns, h_end - h);
        next.add_columns(matrix(p.gate, expert) + h, columns, p.inter, p.hidden);
        next.add_columns(matrix(p.up, expert) + h, columns, p.inter, p.hidden);
    }
    return next;
}
