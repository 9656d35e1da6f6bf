// Members of Moe: gradients of the adapters, sums of outer products over the rows of a group. Included
// inside the class.

enum GradMatrix : int64_t { kDownB, kGateA, kUpA, kDownA, kGateB, kUpB };

static int64_t grad_columns(const Pass& p, int64_t m) {
    return m == kDownB || m == kGateA || m == kUpA ? p.hidden : p.inter;
}
static int64_t grad_tasks_per_group(const Pass& p) {
    return 3 * (pieces(p.hidden, kGradSlab) + pieces(p.inter, kGradSlab));
}

static float* grad_of(const LoraGradView& grads, int64_t m) {
    float* const all[kGradMatrices] = {grads.down_b, grads.gate_a, grads.up_a,
                                       grads.down_a, grads.gate_b, grads.up_b};
    return all[m];
}

// The rank-sized side of a row's outer product: `ranks` of them from q, and zeros.
void left_row(int64_t m, const RowBlock& b, int64_t i, int64_t lines, int64_t q, int64_t ranks,
              float* to) const {
    const float* from = m == kDownB   ? lora_mid(b)
                        : m == kDownA ? lora_out(b)
                        : m == kGateA || m == kUpA ? dlora_in(b)
                                                   : lora_in(b);
    if ((m == kUpA || m == kUpB) && p.parts == 2) from += lines * b.count * kRankLine;
    // dy and what comes from it are unweighted in these two; the others hold the weight already.
    const float factor = m == kDownB || m == kDownA ? p.row_weight[b.begin + i] : 1.0f;
    from += (q / kRankLine * b.count + i) * kRankLine + q % kRankLine;
    for (int64_t j = 0; j < kGradRanks; ++j) to[j] = j < ranks ? factor * from[j] : 0.0f;
}

// Columns [c, c + kColumns) of the wide side of row i: where they lie (S in rows by token, T in packed
// ones), or masked in scratch as floats.
void wide_row(int64_t m, const RowBlock& b, int64_t i, int64_t c, int64_t scratch_row, const void** at) const {
    const int64_t row = b.begin + i;
    const void* halves[2];
    for (int64_t half = 0; half < 2; ++half) {
        const int64_t column = c + half * kLanes;
        if (m == kDownB || m == kGateA || m == kUpA) {
            const S* from = m == kDownB ? dy_row(p.row_token[row]) : x_row(p.row_token[row]);
            halves[half] = from + column;
        } else {
            T* base = m == kDownA ? act(b) : dpair(b);
            const int64_t shift = m == kUpB && p.parts == 2 ? p.inter_pad : 0;
            halves[half] = packed_at(base, b, i, shift + column);
        }
    }
    const bool masked = p.row_hash != nullptr && (m == kGateA || m == kUpA || m == kDownA);
    if (masked) {
        float* to = s.right + scratch_row * kColumns;
        for (int64_t half = 0; half < 2; ++half) {
            if (m == kDownA)
                widen(static_cast<const T*>(halves[half]), kLanes, to + half * kLanes);
            else
                widen(static_cast<const S*>(halves[half]), kLanes, to + half * kLanes);
            halves[half] = to + half * kLanes;
        }
        drop(to, kColumns, c, row, m == kGateA ? kGate : m == kUpA ? kUp : kDown);
    }
    at[0] = halves[0];
    at[1] = halves[1];
}

// tile [kGradRanks][kColumns] = sum over rows of left [rows][kGradRanks] times the wide rows.
template <class From>
static void outer(int64_t rows, const float* left, const void* const* wide, float* tile) {
    Vec sum[kGradRanks][2];
    for (int q = 0; q < kGradRanks; ++q) sum[q][0] = sum[q][1] = vset1(0.0f);
    for (int64_t i = 0; i < rows; ++i) {
        const Vec b0 = vload(static_cast<const From*>(wide[2 * i]));
        const Vec b1 = vload(static_cast<const From*>(wide[2 * i + 1]));
#pragma GCC unroll 8
        for (int q = 0; q < kGradRanks; ++q) {
            const Vec x = vset1(left[i * kGradRanks + q]);
            sum[q][0] = vfma(x, b0, sum[q][0]);
            sum[q][1] = vfma(x, b1, sum[q][1]);
        }
    }
    for (int q = 0; q < kGradRanks; ++q) {
        vstore(tile + q * kColumns, sum[q][0]);
        vstore(tile + q * kColumns + kLanes, sum[q][1]);
    }
}

void adapter_grads(int64_t task) const {
    const Group& group = p.groups[task / grad_tasks_per_group(p)];
    if (group.adapter < 0 || p.lora_grads[group.adapter].up_a == nullptr) return;
    int64_t slab = task % grad_tasks_per_group(p), m = 0;
    for (; slab >= pieces(grad_columns(p, m), kGradSlab); ++m) slab -= pieces(grad_columns(p, m), kGradSlab);
    if (p.parts == 1 && (m == kGateA || m == kGateB)) return;

    const LoraView& lora = p.lora[group.adapter];
    const int64_t r = lora.rank, width = grad_columns(p, m), lines = rank_lines(lora);
    const int64_t c_begin = slab * kGradSlab, c_end = min_of(width, c_begin + kGradSlab);
    const bool is_a = m == kGateA || m == kUpA || m == kDownA;
    const bool masked = p.row_hash != nullptr && is_a;
    const bool by_token = m == kDownB || m == kGateA || m == kUpA;
    float* grad = grad_of(p.lora_grads[group.adapter], m) + group.expert * r * width;

    // The group's blocks are consecutive: find the first.
    int64_t first_block = 0;
    for (int64_t low = 0, high = p.num_blocks; low < high;) {
        const int64_t middle = (low + high) / 2;
        if (p.blocks[middle].begin < group.begin)
            low = middle + 1;
        else
            high = middle;
        first_block = low;
    }
    alignas(64) float tile[kLanes * kColumns];
    for (int64_t q = 0; q < r; q += kGradRanks) {
        const int64_t ranks = min_of(kGradRanks, r - q);
        for (int64_t block = first_block; block < p.num_blocks && p.blocks[block].begin < group.end;) {
            // Whole blocks, at most kGradRows rows of them.
            int64_t rows = 0, end = block;
            for (; end < p.num_blocks && p.blocks[end].begin < group.end &&
                   rows + p.blocks[end].count <= kGradRows;
                 ++end)
                for (int64_t i = 0; i < p.blocks[end].count; ++i, ++rows)
                    left_row(m, p.blocks[end], i, lines, q, ranks, s.left + rows * kGradRanks);
            for (int64_t c = c_begin; c < c_end; c += kColumns) {
                int64_t row = 0;
                for (int64_t n = block; n < end; ++n)
                    for (int64_t i = 0; i < p.blocks[n].count; ++i, ++row)
                        wide_row(m, p.blocks[n], i, c, row, s.rows + 2 * row);
                if (masked)
                    outer<float>(rows, s.left, s.rows, tile);
                else if (by_token)
                    outer<S>(rows, s.left, s.rows, tile);
                else
                    outer<T>(rows, s.left, s.rows, tile);
                add_gradient(tile, grad, is_a, q, ranks, r, c, min_of(kColumns, c_end - c), width);
            }
            block = end;
        }
    }
}

// Adds tile [ranks][columns] to a [r, width] gradient (is_a) or, transposed, to a [width, r] one.
static void add_gradient(const float* tile, float* grad, bool is_a, int64_t q, int64_t ranks, int64_t r,
                         int64_t c, int64_t columns, int64_t width) {
    if (is_a) {
        for (int64_t k = 0; k < ranks; ++k)
            for (int64_t j = 0; j < columns; ++j) grad[(q + k) * width + c + j] += tile[k * kColumns + j];
        return;
    }
    alignas(64) float turned[kLanes * kLanes];
    for (int64_t half = 0; half < columns; half += kLanes) {
        transpose_block(tile + half, kColumns, turned, kLanes);
        for (int64_t j = 0; j < min_of(kLanes, columns - half); ++j) {
            float* to = grad + (c + half + j) * r + q;
            for (int64_t k = 0; k < ranks; ++k) to[k] += turned[j * kLanes + k];
        }
    }
}
