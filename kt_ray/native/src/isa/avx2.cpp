// AVX2 with FMA: float32 compute, other storage widened.
#include <immintrin.h>

#include <cstring>
#include <utility>

#include "dropout.h"
#include "kernels.h"

namespace kt::avx2 {
namespace {

#include "generic/scalar.inl"

constexpr int64_t kLanes = 8;
constexpr int64_t kMaxRowsF32 = 6;

using Vec = __m256;
inline Vec vload(const float* p) { return _mm256_loadu_ps(p); }
inline Vec vload(const Bf16* p) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
inline void vstore(float* p, Vec v) { _mm256_storeu_ps(p, v); }
inline Vec vset1(float v) { return _mm256_set1_ps(v); }
inline Vec vfma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }

// to[k * step + n] = from[n * ld + k] for a square of kLanes.
inline void transpose_block(const float* from, int64_t ld, float* to, int64_t step) {
    __m256 a[8], b[8];
    for (int n = 0; n < 8; ++n) a[n] = vload(from + n * ld);
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
        vstore(to + k * step, _mm256_permute2f128_ps(a[k], a[4 + k], 0x20));
        vstore(to + (k + 4) * step, _mm256_permute2f128_ps(a[k], a[4 + k], 0x31));
    }
}

// Pairs of 16 bits, or int32 sums.
using IVec = __m256i;
inline IVec iload(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void istore(void* p, IVec v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
inline IVec iset1(int32_t v) { return _mm256_set1_epi32(v); }
inline IVec idot(IVec sum, IVec panel, IVec left) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(panel, left));
}

#include "generic/vector.inl"
#include "generic/formats.inl"
#include "generic/micro_f32.inl"
#include "generic/panels.inl"
#include "generic/rows.inl"

// The first eight signed bytes, and eight of sixteen halves.
inline Vec widened(__m128i bytes) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)); }
inline Vec halves(__m256i v, int64_t which) {
    return _mm256_cvtph_ps(which == 0 ? _mm256_castsi256_si128(v) : _mm256_extracti128_si256(v, 1));
}

#include "isa/avx_rows.inl"
#include "generic/ahead.inl"
#include "generic/activation.inl"
#include "generic/int8.inl"
#include "generic/micro_int8.inl"
#include "generic/moe.inl"

}  // namespace

const Kernels f32 = Entry<float, ComputeF32>::kernels;
const Kernels bf16 = Entry<Bf16, ComputeF32>::kernels;
const Kernels int8 =
    Entry<Bf16, ComputeInt8<ComputeF32, MicroInt8<int16_t, 0>, PlainInt8Ahead<0, int16_t>>>::kernels;

}  // namespace kt::avx2
