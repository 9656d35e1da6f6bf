// Members of Moe: LoRA projections to rank r, and the gradients of the adapters. Included inside the class.

// out(row)[0..rank) = scale * input(row)[0..depth) times a [depth, rank] matrix, for the rows of a chunk.
// fill(row, k, n, to) writes input elements [k, k + n); decode(column, columns, k, n, panel) the matrix.
template <class Fill, class Decode, class Out>
void project(const Chunk& chunk, int64_t depth, int64_t rank, float scale, const Fill& fill,
             const Decode& decode, const Out& out) const {
    const int64_t rows = chunk.end - chunk.begin;
    for (int64_t k = 0; k < depth; k += kDepthBlock) {
        const int64_t n = min_of(kDepthBlock, depth - k);
        for (int64_t i = 0; i < rows; ++i) fill(chunk.begin + i, k, n, s.inputs + i * kDepthBlock);
        for (int64_t c = 0; c < rank; c += kColumns) {
            decode(c, min_of(kColumns, rank - c), k, n, s.lora_panel);
            float* sums = s.sums + c * kMaxChunkRows;
            row_blocks(0, rows, [&](int64_t i, int count) {
                multiply<MicroF32>(
                    count, [&](int q) { return s.inputs + (i + q) * kDepthBlock; }, n, s.lora_panel,
                    sums + i * kColumns, k > 0);
            });
        }
    }
    for (int64_t i = 0; i < rows; ++i) {
        float* to = out(chunk.begin + i);
        for (int64_t c = 0; c < rank; ++c)
            to[c] = scale * s.sums[c / kColumns * kColumns * kMaxChunkRows + i * kColumns + c % kColumns];
    }
}

// The same with a [rank, depth] matrix, as every A is stored.
template <class Fill, class Out>
void project_a(const Chunk& chunk, const float* a, int64_t depth, int64_t rank, float scale, const Fill& fill,
               const Out& out) const {
    project(
        chunk, depth, rank, scale, fill,
        [&](int64_t c, int64_t columns, int64_t k, int64_t n, float* panel) {
            full_panel_from_rows<MicroF32>(a + c * depth + k, depth, columns, n, n, panel);
        },
        out);
}

// The same with a [depth, rank] matrix, as every B is stored.
template <class Fill, class Out>
void project_b(const Chunk& chunk, const float* b, int64_t depth, int64_t rank, float scale, const Fill& fill,
               const Out& out) const {
    project(
        chunk, depth, rank, scale, fill,
        [&](int64_t c, int64_t columns, int64_t k, int64_t n, float* panel) {
            panel_from_columns<MicroF32>(b + k * rank + c, rank, columns, n, n, panel);
        },
        out);
}

// Dropped-out inputs of one row, elements [k, k + n).
void input_x(int64_t row, int64_t k, int64_t n, Projection projection, float* to) const {
    widen(x_row(p.row_token[row]) + k, n, to);
    drop(to, n, k, row, projection);
}
void input_act(int64_t row, int64_t k, int64_t n, float* to) const {
    widen(act_row(row) + k, n, to);
    drop(to, n, k, row, kDown);
}

const LoraView* lora_of(const Chunk& chunk, int64_t* expert) const {
    const Group& group = p.groups[chunk.group];
    *expert = group.expert;
    return group.adapter < 0 ? nullptr : p.lora + group.adapter;
}

void lora_in(int64_t task) const {
    int64_t e;
    const Chunk& chunk = p.chunks[task];
    const LoraView* lora = lora_of(chunk, &e);
    if (lora == nullptr) return;
    const int64_t r = lora->rank, at = e * r * p.hidden;
    project_a(
        chunk, lora->gate_a + at, p.hidden, r, lora->scale,
        [&](int64_t row, int64_t k, int64_t n, float* to) { input_x(row, k, n, kGate, to); },
        [&](int64_t row) { return lora_in_row(row); });
    project_a(
        chunk, lora->up_a + at, p.hidden, r, lora->scale,
        [&](int64_t row, int64_t k, int64_t n, float* to) { input_x(row, k, n, kUp, to); },
        [&](int64_t row) { return lora_in_row(row) + r; });
}

void lora_mid(int64_t task) const {
    int64_t e;
    const Chunk& chunk = p.chunks[task];
    const LoraView* lora = lora_of(chunk, &e);
    if (lora == nullptr) return;
    project_a(
        chunk, lora->down_a + e * lora->rank * p.inter, p.inter, lora->rank, lora->scale,
        [&](int64_t row, int64_t k, int64_t n, float* to) { input_act(row, k, n, to); },
        [&](int64_t row) { return lora_mid_row(row); });
}

void lora_out(int64_t task) const {
    int64_t e;
    const Chunk& chunk = p.chunks[task];
    const LoraView* lora = lora_of(chunk, &e);
    if (lora == nullptr) return;
    project_b(
        chunk, lora->down_b + e * lora->rank * p.hidden, p.hidden, lora->rank, lora->scale,
        [&](int64_t row, int64_t k, int64_t n, float* to) {
            widen(p.dy + p.row_token[row] * p.hidden + k, n, to);
        },
        [&](int64_t row) { return lora_out_row(row); });
}

// Back through B_gate and B_up; and dw, whose parts are complete by now.
void dlora_in(int64_t task) const {
    const Chunk& chunk = p.chunks[task];
    const int64_t slabs = pieces(p.inter, kSlab);
    for (int64_t row = chunk.begin; row < chunk.end; ++row) {
        float sum = 0.0f;
        for (int64_t slab = 0; slab < slabs; ++slab) sum += p.dw_parts[slab * p.rows + row];
        p.dw_rows[row] = sum;
    }
    int64_t e;
    const LoraView* lora = lora_of(chunk, &e);
    if (lora == nullptr) return;
    const int64_t r = lora->rank, at = e * r * p.inter;
    project_b(
        chunk, lora->gate_b + at, p.inter, r, lora->scale,
        [&](int64_t row, int64_t k, int64_t n, float* to) { widen(dpair_row(row) + k, n, to); },
        [&](int64_t row) { return dlora_in_row(row); });
    project_b(
        chunk, lora->up_b + at, p.inter, r, lora->scale,
        [&](int64_t row, int64_t k, int64_t n, float* to) {
            widen(dpair_row(row) + p.inter_even + k, n, to);
        },
        [&](int64_t row) { return dlora_in_row(row) + r; });
}

// One adapter matrix's gradient is a sum over rows of left(row) [rank] times right(row) [columns].
enum GradMatrix { kDownB, kGateA, kUpA, kDownA, kGateB, kUpB };

static int64_t grad_columns(const Pass& p, int64_t m) { return m <= kUpA ? p.hidden : p.inter; }
static int64_t grad_tasks_per_group(const Pass& p) {
    return 3 * pieces(p.hidden, kGradSlab) + 3 * pieces(p.inter, kGradSlab);
}

void left_column(int64_t m, int64_t row, int64_t r, float* to, int64_t stride) const {
    const float weight = p.row_weight[row];
    const float* from;
    switch (m) {
        case kDownB:
            from = lora_mid_row(row);
            break;
        case kDownA:
            from = lora_out_row(row);
            break;
        case kGateA:
            from = dlora_in_row(row);
            break;
        case kUpA:
            from = dlora_in_row(row) + r;
            break;
        case kGateB:
            from = lora_in_row(row);
            break;
        default:
            from = lora_in_row(row) + r;
            break;
    }
    // dy and what comes from it are unweighted in these two; the others hold the weight already.
    const float factor = m == kDownB || m == kDownA ? weight : 1.0f;
    for (int64_t q = 0; q < r; ++q) to[q * stride] = factor * from[q];
}

void right_row(int64_t m, int64_t row, int64_t c, int64_t n, float* to) const {
    switch (m) {
        case kDownB:
            widen(p.dy + p.row_token[row] * p.hidden + c, n, to);
            break;
        case kDownA:
            input_act(row, c, n, to);
            break;
        case kGateA:
            input_x(row, c, n, kGate, to);
            break;
        case kUpA:
            input_x(row, c, n, kUp, to);
            break;
        case kGateB:
            widen(dpair_row(row) + c, n, to);
            break;
        default:
            widen(dpair_row(row) + p.inter_even + c, n, to);
            break;
    }
    for (int64_t j = n; j < kColumns; ++j) to[j] = 0.0f;
}

static float* grad_of(const LoraGradView& grads, int64_t m) {
    float* const all[kGradMatrices] = {grads.down_b, grads.gate_a, grads.up_a,
                                       grads.down_a, grads.gate_b, grads.up_b};
    return all[m];
}

void adapter_grads(int64_t task) const {
    const Group& group = p.groups[task / grad_tasks_per_group(p)];
    if (group.adapter < 0 || p.lora_grads[group.adapter].gate_a == nullptr) return;
    int64_t slab = task % grad_tasks_per_group(p), m = 0;
    for (; slab >= pieces(grad_columns(p, m), kGradSlab); ++m) slab -= pieces(grad_columns(p, m), kGradSlab);

    const int64_t r = p.lora[group.adapter].rank, width = grad_columns(p, m);
    const int64_t c_begin = slab * kGradSlab, c_end = min_of(width, c_begin + kGradSlab);
    const bool is_a = m == kGateA || m == kUpA || m == kDownA;
    float* grad = grad_of(p.lora_grads[group.adapter], m) + group.expert * r * width;
    for (int64_t first = group.begin; first < group.end; first += kRowBlock) {
        const int64_t rows = min_of(kRowBlock, group.end - first);
        for (int64_t k = 0; k < rows; ++k) left_column(m, first + k, r, s.left + k, kRowBlock);
        for (int64_t c = c_begin; c < c_end; c += kColumns) {
            const int64_t columns = min_of(kColumns, c_end - c);
            for (int64_t k = 0; k < rows; ++k)
                right_row(m, first + k, c, columns, s.lora_panel + k * kColumns);
            row_blocks(0, r, [&](int64_t q, int count) {
                multiply<MicroF32>(
                    count, [&](int k) { return s.left + (q + k) * kRowBlock; }, rows, s.lora_panel, s.tile,
                    false);
                for (int k = 0; k < count; ++k)
                    for (int64_t j = 0; j < columns; ++j)
                        grad[is_a ? (q + k) * width + c + j : (c + j) * r + q + k] +=
                            s.tile[k * kColumns + j];
            });
        }
    }
}
