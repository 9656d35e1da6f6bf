// Members of Moe: forward. Included inside the class.

void convert_x(int64_t task) const {
    const int64_t end = min_of(p.tokens, (task + 1) * kTokenChunk);
    for (int64_t t = task * kTokenChunk; t < end; ++t) {
        S* kept = static_cast<S*>(p.x) + t * p.hidden_stride;
        if (p.x_in_bf16) {
            const Bf16* from = static_cast<const Bf16*>(p.x_in) + t * p.hidden;
            for (int64_t j = 0; j < p.hidden; ++j) kept[j] = from_float<S>(to_float(from[j]));
        } else {
            const float* from = static_cast<const float*>(p.x_in) + t * p.hidden;
            for (int64_t j = 0; j < p.hidden; ++j) kept[j] = from_float<S>(from[j]);
        }
        for (int64_t j = p.hidden; j < p.hidden_stride; ++j) kept[j] = from_float<S>(0.0f);
    }
    widen_x(task);
}

// Where the compute type is wider than the storage type, x is widened once per token.
void widen_x(int64_t task) const {
    if (p.x_compute == p.x) return;
    const int64_t end = min_of(p.tokens, (task + 1) * kTokenChunk);
    const S* from = static_cast<const S*>(p.x);
    T* to = static_cast<T*>(p.x_compute);
    for (int64_t j = task * kTokenChunk * p.hidden_stride; j < end * p.hidden_stride; ++j)
        to[j] = from_float<T>(to_float(from[j]));
}

// The LoRA part of a gate|up panel: [2 * rank] deep, B_gate over the first half, B_up over the second.
void lora_pair_panel(const LoraView& lora, int64_t expert, int64_t i, int64_t columns) const {
    const int64_t r = lora.rank;
    float* second = s.lora_panel + r * kColumns;
    const int64_t at = (expert * p.inter + i) * r;
    panel_from_rows<MicroF32>(lora.gate_b + at, r, columns, r, r, s.lora_panel);
    zero_half(r, s.lora_panel + kLanes);
    zero_half(r, second);
    panel_from_rows<MicroF32>(lora.up_b + at, r, columns, r, r, second + kLanes);
}

// gate, up and act of one expert for a slab of I.
void gate_up(int64_t task) const {
    const int64_t slabs = pieces(p.inter, kSlab);
    const ExpertRows& expert = p.expert_rows[task / slabs];
    const int64_t i_begin = task % slabs * kSlab, i_end = min_of(p.inter, i_begin + kSlab);
    const int64_t steps = pieces(p.hidden, M::kPack);
    const S* gate = matrix(p.gate, expert.expert);
    const S* up = matrix(p.up, expert.expert);
    for (int64_t i = i_begin; i < i_end; i += kLanes) {
        const int64_t columns = min_of(kLanes, i_end - i);
        panel_from_rows<M>(gate + i * p.hidden, p.hidden, columns, p.hidden, steps, s.panel);
        panel_from_rows<M>(up + i * p.hidden, p.hidden, columns, p.hidden, steps,
                           s.panel + kLanes * M::kPack);
        Prefetch next;
        next.add_rows(gate + (i + kLanes) * p.hidden, min_of(kLanes, p.inter - i - kLanes), p.hidden);
        next.add_rows(up + (i + kLanes) * p.hidden, min_of(kLanes, p.inter - i - kLanes), p.hidden);
        for (int64_t g = expert.group_begin; g < expert.group_end; ++g) {
            const Group& group = p.groups[g];
            const LoraView* lora = group.adapter < 0 ? nullptr : p.lora + group.adapter;
            if (lora != nullptr) lora_pair_panel(*lora, expert.expert, i, columns);
            row_blocks(group.begin, group.end, [&](int64_t row, int count) {
                multiply<M>(
                    count, [&](int k) { return x_row(p.row_token[row + k]); }, steps, s.panel, s.tile, false,
                    &next);
                if (lora != nullptr)
                    multiply<MicroF32>(
                        count, [&](int k) { return lora_in_row(row + k); }, 2 * lora->rank, s.lora_panel,
                        s.tile, true);
                for (int k = 0; k < count; ++k) activate(s.tile + k * kColumns, row + k, i, columns);
            });
        }
    }
}

// act = silu(gate) * up from the stored gate and up, so that keeping or recomputing them is the same.
void activate(const float* tile, int64_t row, int64_t i, int64_t columns) const {
    S gate[kLanes], up[kLanes];
    T act[kLanes];
    for (int64_t j = 0; j < kLanes; ++j) {
        gate[j] = from_float<S>(tile[j]);
        up[j] = from_float<S>(tile[kLanes + j]);
        const float g = to_float(gate[j]);
        act[j] = from_float<T>(through<S>(g * sigmoid(g) * to_float(up[j])));
    }
    memcpy(act_row(row) + i, act, columns * sizeof(T));
    pad(act_row(row), i + columns);
    if (p.pair != nullptr) {
        memcpy(pair_row(row) + i, gate, columns * sizeof(S));
        memcpy(pair_row(row) + p.inter_even + i, up, columns * sizeof(S));
    }
}

// The column that makes an odd I even is read by the micro-kernel.
void pad(T* row, int64_t end) const {
    if (end == p.inter && p.inter_even > p.inter) row[p.inter] = from_float<T>(0.0f);
}

// y for a slab of H, over all experts in order.
void down(int64_t task) const {
    const int64_t h_begin = task * p.slab_columns, h_end = min_of(p.hidden, h_begin + p.slab_columns);
    for (int64_t t = 0; t < p.tokens; ++t)
        memset(p.y + t * p.hidden + h_begin, 0, (h_end - h_begin) * sizeof(float));
    const int64_t steps = pieces(p.inter, M::kPack);
    for (int64_t e = 0; e < p.num_expert_rows; ++e) {
        const ExpertRows& expert = p.expert_rows[e];
        const S* w = matrix(p.down, expert.expert);
        for (int64_t h = h_begin; h < h_end; h += kColumns) {
            const int64_t columns = min_of(kColumns, h_end - h);
            full_panel_from_rows<M>(w + h * p.inter, p.inter, columns, p.inter, steps, s.panel);
            Prefetch next = next_rows(e, h, h_begin, h_end);
            for (int64_t g = expert.group_begin; g < expert.group_end; ++g) {
                const Group& group = p.groups[g];
                const LoraView* lora = group.adapter < 0 ? nullptr : p.lora + group.adapter;
                if (lora != nullptr)
                    full_panel_from_rows<MicroF32>(lora->down_b + (expert.expert * p.hidden + h) * lora->rank,
                                                   lora->rank, columns, lora->rank, lora->rank, s.lora_panel);
                row_blocks(group.begin, group.end, [&](int64_t row, int count) {
                    multiply<M>(
                        count, [&](int k) { return act_row(row + k); }, steps, s.panel, s.tile, false, &next);
                    if (lora != nullptr)
                        multiply<MicroF32>(
                            count, [&](int k) { return lora_mid_row(row + k); }, lora->rank, s.lora_panel,
                            s.tile, true);
                    for (int k = 0; k < count; ++k)
                        scatter(p.y + p.row_token[row + k] * p.hidden + h, s.tile + k * kColumns,
                                p.row_weight[row + k], columns);
                });
            }
        }
    }
}

// The panel of `down` after columns h of expert e: the slab's next, or the next expert's first.
Prefetch next_rows(int64_t e, int64_t h, int64_t h_begin, int64_t h_end) const {
    Prefetch next;
    h += kColumns;
    if (h >= h_end) {
        h = h_begin;
        ++e;
    }
    if (e < p.num_expert_rows)
        next.add_rows(matrix(p.down, p.expert_rows[e].expert) + h * p.inter, min_of(kColumns, h_end - h),
                      p.inter);
    return next;
}

static void scatter(float* to, const float* tile, float weight, int64_t columns) {
    if (columns == kColumns)
        for (int64_t j = 0; j < kColumns; ++j) to[j] += weight * tile[j];
    else
        for (int64_t j = 0; j < columns; ++j) to[j] += weight * tile[j];
}
