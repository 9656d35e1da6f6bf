// AVX-512 with AVX512_BF16: bfloat16 weights multiply as pairs in vdpbf16ps, float32 ones as in avx512.
#include <immintrin.h>

#include <cstring>

#include "dropout.h"
#include "kernels.h"

namespace kt::avx512_bf16 {
namespace {

#include "generic/scalar.inl"
#include "generic/prefetch.inl"
#include "isa/dispatch_rows.inl"
#include "isa/avx512_common.inl"

// Pairs along the contraction travel as dwords: panel[k * step + 2 n + q] = w[n][2 k + q].
inline void block_from_rows(const Bf16* w, int64_t ld, Bf16* panel, int64_t step) {
    __m512i a[16];
    for (int n = 0; n < 16; ++n) a[n] = _mm512_loadu_si512(w + n * ld);
    store_transposed(a, reinterpret_cast<char*>(panel), step * static_cast<int64_t>(sizeof(Bf16)));
}

// Two rows of 32 columns become pairs: to[2 n + q] = row q, column n.
inline void interleave_columns(const Bf16* row0, const Bf16* row1, Bf16* to) {
    alignas(64) static constexpr uint16_t kFirst[32] = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,
                                                        37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
                                                        11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i low = _mm512_load_si512(kFirst), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    const __m512i a = _mm512_loadu_si512(row0), b = _mm512_loadu_si512(row1);
    _mm512_storeu_si512(to, _mm512_permutex2var_epi16(a, low, b));
    _mm512_storeu_si512(to + 32, _mm512_permutex2var_epi16(a, high, b));
}

struct MicroBf16 {
    using T = Bf16;
    static constexpr int64_t kPack = 2;

    template <int N>
    static void tile(const Bf16* const* rows, int64_t steps, const Bf16* panel, float* tile, bool accumulate,
                     Prefetch::Stream next) {
        __m512 sum[N][2];
        const char* row[N];
        for (int i = 0; i < N; ++i) {
            row[i] = reinterpret_cast<const char*>(rows[i]);
            sum[i][0] = accumulate ? _mm512_loadu_ps(tile + i * 32) : _mm512_setzero_ps();
            sum[i][1] = accumulate ? _mm512_loadu_ps(tile + i * 32 + 16) : _mm512_setzero_ps();
        }
        for (int64_t k = 0; k < steps; ++k) {
            _mm_prefetch(next.at + k * next.stride, _MM_HINT_T1);
            const __m512bh b0 = (__m512bh)_mm512_loadu_si512(panel + k * 64);
            const __m512bh b1 = (__m512bh)_mm512_loadu_si512(panel + k * 64 + 32);
#pragma GCC unroll 16
            for (int i = 0; i < N; ++i) {
                int pair;
                memcpy(&pair, row[i] + 4 * k, sizeof(pair));
                const __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
                sum[i][0] = _mm512_dpbf16_ps(sum[i][0], x, b0);
                sum[i][1] = _mm512_dpbf16_ps(sum[i][1], x, b1);
            }
        }
        for (int i = 0; i < N; ++i) {
            _mm512_storeu_ps(tile + i * 32, sum[i][0]);
            _mm512_storeu_ps(tile + i * 32 + 16, sum[i][1]);
        }
    }

    // tile [count][2 * kLanes] (+)= rows [count][2 * steps] times panel [steps][2 * kLanes][2].
    static void run(int count, const Bf16* const* rows, int64_t steps, const Bf16* panel, float* to,
                    bool accumulate, Prefetch::Stream next) {
        RowTable<MicroBf16, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14>::tiles[count - 1](
            rows, steps, panel, to, accumulate, next);
    }
};

#include "generic/panels.inl"
#include "generic/moe.inl"

}  // namespace

const Kernels f32 = Entry<float, MicroF32>::kernels;
const Kernels bf16 = Entry<Bf16, MicroBf16>::kernels;

}  // namespace kt::avx512_bf16
