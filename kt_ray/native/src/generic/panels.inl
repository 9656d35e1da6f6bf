// Panel decoders: a block of a row-major matrix becomes what the micro-kernel eats, in either
// orientation, so that one copy of the weights serves forward and backward.
//
// A panel holds 2 * kLanes columns, [step][2][kLanes][M::kPack]: two vectors per step, each lane with
// kPack consecutive elements of the contraction. The halves are filled separately, as gate and up
// share a panel. Columns beyond `columns` and depths beyond `depth` are zero. `panel` points at a half.

template <class M>
constexpr int64_t step_size() {
    return 2 * kLanes * M::kPack;
}

// Contraction along the matrix's rows: column n of the panel is row n of `w` (leading dimension ld).
template <class M, class S>
void panel_from_rows(const S* w, int64_t ld, int64_t columns, int64_t depth, int64_t steps,
                     typename M::T* panel) {
    constexpr int64_t kDepth = kLanes * M::kPack;  // depth of one square block
    const int64_t blocks = columns == kLanes ? depth / kDepth : 0;
    for (int64_t b = 0; b < blocks; ++b)
        block_from_rows(w + b * kDepth, ld, panel + b * kLanes * step_size<M>(), step_size<M>());
    for (int64_t step = blocks * kLanes; step < steps; ++step)
        for (int64_t n = 0; n < kLanes; ++n)
            for (int64_t q = 0; q < M::kPack; ++q) {
                const int64_t k = step * M::kPack + q;
                const float v = n < columns && k < depth ? to_float(w[n * ld + k]) : 0.0f;
                panel[step * step_size<M>() + n * M::kPack + q] = from_float<typename M::T>(v);
            }
}

// Both halves of a panel over columns [0, columns), at most 2 * kLanes of them.
template <class M, class S>
void full_panel_from_rows(const S* w, int64_t ld, int64_t columns, int64_t depth, int64_t steps,
                          typename M::T* panel) {
    panel_from_rows<M>(w, ld, min_of(columns, kLanes), depth, steps, panel);
    panel_from_rows<M>(w + kLanes * ld, ld, max_of(columns - kLanes, 0), depth, steps,
                       panel + kLanes * M::kPack);
}

// Contraction down the matrix's columns: column n of the panel, of at most 2 * kLanes, is column n of `w`.
// Both halves at once, so that a cache line of the matrix is read once.
template <class M, class S>
void panel_from_columns(const S* w, int64_t ld, int64_t columns, int64_t depth, int64_t steps,
                        typename M::T* panel) {
    using T = typename M::T;
    const int64_t whole = columns == 2 * kLanes ? depth / M::kPack : 0;
    for (int64_t step = 0; step < whole; ++step) {
        const S* from = w + step * M::kPack * ld;
        T* to = panel + step * step_size<M>();
        if constexpr (M::kPack == 1) {
            for (int64_t n = 0; n < 2 * kLanes; ++n) to[n] = from_float<T>(to_float(from[n]));
        } else {
            interleave_columns(from, from + ld, to);
        }
    }
    for (int64_t step = whole; step < steps; ++step)
        for (int64_t n = 0; n < 2 * kLanes; ++n)
            for (int64_t q = 0; q < M::kPack; ++q) {
                const int64_t k = step * M::kPack + q;
                const float v = n < columns && k < depth ? to_float(w[k * ld + n]) : 0.0f;
                panel[step * step_size<M>() + n * M::kPack + q] = from_float<T>(v);
            }
}

inline void zero_half(int64_t steps, float* panel) {
    for (int64_t step = 0; step < steps; ++step)
        for (int64_t n = 0; n < kLanes; ++n) panel[step * 2 * kLanes + n] = 0.0f;
}
