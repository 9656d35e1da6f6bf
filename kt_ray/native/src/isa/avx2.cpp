// AVX2 with FMA: float32 compute, bfloat16 storage widened.
#include <immintrin.h>

#include <cstring>

#include "dropout.h"
#include "kernels.h"

namespace kt::avx2 {
namespace {

#include "generic/scalar.inl"
#include "generic/prefetch.inl"
#include "isa/dispatch_rows.inl"

constexpr int64_t kLanes = 8;
constexpr int kMaxRows = 6;

inline __m256 load_widened(const float* p) { return _mm256_loadu_ps(p); }
inline __m256 load_widened(const Bf16* p) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

// A square block of a matrix, transposed into a panel: panel[k * step + n] = w[n][k].
template <class S>
void block_from_rows(const S* w, int64_t ld, float* panel, int64_t step) {
    __m256 a[8], b[8];
    for (int n = 0; n < 8; ++n) a[n] = load_widened(w + n * ld);
    for (int n = 0; n < 8; n += 2) {
        b[n] = _mm256_unpacklo_ps(a[n], a[n + 1]);
        b[n + 1] = _mm256_unpackhi_ps(a[n], a[n + 1]);
    }
    for (int n = 0; n < 8; n += 4)
        for (int q = 0; q < 2; ++q) {
            a[n + 2 * q] = _mm256_shuffle_ps(b[n + q], b[n + 2 + q], 0x44);
            a[n + 2 * q + 1] = _mm256_shuffle_ps(b[n + q], b[n + 2 + q], 0xee);
        }
    for (int k = 0; k < 4; ++k) {
        _mm256_storeu_ps(panel + k * step, _mm256_permute2f128_ps(a[k], a[4 + k], 0x20));
        _mm256_storeu_ps(panel + (k + 4) * step, _mm256_permute2f128_ps(a[k], a[4 + k], 0x31));
    }
}

struct MicroF32 {
    using T = float;
    static constexpr int64_t kPack = 1;

    template <int N>
    static void tile(const float* const* rows, int64_t steps, const float* panel, float* tile,
                     bool accumulate, Prefetch::Stream next) {
        __m256 sum[N][2];
        const float* row[N];
        for (int i = 0; i < N; ++i) {
            row[i] = rows[i];
            sum[i][0] = accumulate ? _mm256_loadu_ps(tile + i * 16) : _mm256_setzero_ps();
            sum[i][1] = accumulate ? _mm256_loadu_ps(tile + i * 16 + 8) : _mm256_setzero_ps();
        }
        for (int64_t k = 0; k < steps; ++k) {
            _mm_prefetch(next.at + k * next.stride, _MM_HINT_T1);
            const __m256 b0 = _mm256_loadu_ps(panel + k * 16), b1 = _mm256_loadu_ps(panel + k * 16 + 8);
#pragma GCC unroll 8
            for (int i = 0; i < N; ++i) {
                const __m256 x = _mm256_broadcast_ss(row[i] + k);
                sum[i][0] = _mm256_fmadd_ps(x, b0, sum[i][0]);
                sum[i][1] = _mm256_fmadd_ps(x, b1, sum[i][1]);
            }
        }
        for (int i = 0; i < N; ++i) {
            _mm256_storeu_ps(tile + i * 16, sum[i][0]);
            _mm256_storeu_ps(tile + i * 16 + 8, sum[i][1]);
        }
    }

    // tile [count][2 * kLanes] (+)= rows [count][steps] times panel [steps][2 * kLanes].
    static void run(int count, const float* const* rows, int64_t steps, const float* panel, float* to,
                    bool accumulate, Prefetch::Stream next) {
        RowTable<MicroF32, 1, 2, 3, 4, 5, 6>::tiles[count - 1](rows, steps, panel, to, accumulate, next);
    }
};

#include "generic/panels.inl"
#include "generic/moe.inl"

}  // namespace

const Kernels f32 = Entry<float, MicroF32>::kernels;
const Kernels bf16 = Entry<Bf16, MicroF32>::kernels;

}  // namespace kt::avx2
