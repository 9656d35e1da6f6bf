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

// The rank-sized side of a row's outer product: `ranks` of them from q, and zeros. Row i of a segment.
void left_row(int64_t m, const Segment& g, int64_t i, int64_t lines, int64_t q, int64_t ranks,
              float* to) const {
    const float* from = m == kDownB                ? lora_mid(g)
                        : m == kDownA              ? lora_out(g)
                        : m == kGateA || m == kUpA ? dlora_in(g)
                                                   : lora_in(g);
    if ((m == kUpA || m == kUpB) && p.parts == 2) from += lines * g.count * kRankLine;
    // dy and what comes from it are unweighted in these two; the others hold the weight already.
    const float factor = m == kDownB || m == kDownA ? p.row_weight[g.begin + i] : 1.0f;
    from += (q / kRankLine * g.count + i) * kRankLine + q % kRankLine;
    for (int64_t j = 0; j < kGradRanks; ++j) to[j] = j < ranks ? factor * from[j] : 0.0f;
}

// The wide side of row i of a block from column c on: S in rows by token, T in packed ones.
WideRow wide_row(int64_t m, const RowBlock& b, int64_t i, int64_t c) const {
    if (m == kDownB || m == kGateA || m == kUpA) {
        const S* row = m == kDownB ? dy_row(p.row_token[b.begin + i]) : x_row(p.row_token[b.begin + i]);
        constexpr int64_t kSize = sizeof(S);
        return {reinterpret_cast<const char*>(row + c), kLanes * kSize, kColumns * kSize};
    }
    const int64_t shift = m == kUpB && p.parts == 2 ? p.inter_pad : 0;
    T* base = m == kDownA ? act(b) : dpair(b);
    const auto at = [&](int64_t column) {
        return reinterpret_cast<const char*>(packed_at(base, b, i, shift + column));
    };
    return {at(c), at(c + kLanes) - at(c), kColumns * b.count * static_cast<int64_t>(sizeof(T))};
}

// A row's columns with dropped elements zeroed and the others scaled, in scratch.
template <class From>
void mask_row(const WideRow& from, int64_t c, int64_t row, Projection projection, float* to) const {
    vstore(to, vload(reinterpret_cast<const From*>(from.at)));
    vstore(to + kLanes, vload(reinterpret_cast<const From*>(from.at + from.second)));
    drop(to, kColumns, c, row, projection);
}

// tile [kGradRanks][kColumns] = sum over rows of left [rows][kGradRanks] times the wide rows.
template <class From>
static void outer(int64_t rows, const float* left, const WideRow* wide, float* tile) {
    Vec sum[kGradRanks][2];
    for (int q = 0; q < kGradRanks; ++q) sum[q][0] = sum[q][1] = vset1(0.0f);
    for (int64_t i = 0; i < rows; ++i) {
        // The next columns' line, to the L2 cache: rows a power of two apart share a set of the L1.
        __builtin_prefetch(wide[i].at + wide[i].step, 0, 2);
        const Vec b0 = vload(reinterpret_cast<const From*>(wide[i].at));
        const Vec b1 = vload(reinterpret_cast<const From*>(wide[i].at + wide[i].second));
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

    alignas(64) float tile[kLanes * kColumns];
    for (int64_t q = 0; q < r; q += kGradRanks) {
        const int64_t ranks = min_of(kGradRanks, r - q);
        const Segment* g = p.segments + group.segment_begin;
        for (int64_t first = group.begin; first < group.end; first += kGradRows) {
            const int64_t rows = min_of(kGradRows, group.end - first);
            for (int64_t k = 0; k < rows; ++k) {
                if (first + k == g->begin + g->count) ++g;
                const RowBlock& b = block_of(*g);
                left_row(m, *g, first + k - g->begin, lines, q, ranks, s.left + k * kGradRanks);
                s.wide[k] = wide_row(m, b, first + k - b.begin, c_begin);
            }
            for (int64_t c = c_begin; c < c_end; c += kColumns) {
                if (masked) {
                    const Projection projection = m == kGateA ? kGate : m == kUpA ? kUp : kDown;
                    for (int64_t i = 0; i < rows; ++i) {
                        float* to = s.right + i * kColumns;
                        const int64_t row = first + i;
                        if (by_token)
                            mask_row<S>(s.wide[i], c, row, projection, to);
                        else
                            mask_row<T>(s.wide[i], c, row, projection, to);
                        s.masked_wide[i] = {reinterpret_cast<const char*>(to), kLanes * 4, 0};
                    }
                    outer<float>(rows, s.left, s.masked_wide, tile);
                } else if (by_token) {
                    outer<S>(rows, s.left, s.wide, tile);
                } else {
                    outer<T>(rows, s.left, s.wide, tile);
                }
                for (int64_t i = 0; i < rows; ++i) s.wide[i].at += s.wide[i].step;
                add_gradient(tile, grad, is_a, q, ranks, r, c, min_of(kColumns, c_end - c), width);
            }
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
