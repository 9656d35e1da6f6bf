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
// sum + a * b in the register where it is: left to itself the compiler moves sums about, and to the stack.
inline Vec vadd_product(Vec sum, Vec a, Vec b) {
    __asm__("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
    return sum;
}

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

using Dwords = uint32_t __attribute__((vector_size(32)));
// 16 bytes of rows 0, 4 in the 128-bit lanes.
inline Dwords load_lanes(const uint8_t* from, int64_t row_bytes) {
    const auto row = [&](int64_t n) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + n * row_bytes));
    };
    return (Dwords)_mm256_inserti128_si256(_mm256_castsi128_si256(row(0)), row(4), 1);
}
inline Dwords unpack_low_32(Dwords a, Dwords b) {
    return (Dwords)_mm256_unpacklo_epi32((__m256i)a, (__m256i)b);
}
inline Dwords unpack_high_32(Dwords a, Dwords b) {
    return (Dwords)_mm256_unpackhi_epi32((__m256i)a, (__m256i)b);
}
inline Dwords unpack_low_64(Dwords a, Dwords b) {
    return (Dwords)_mm256_unpacklo_epi64((__m256i)a, (__m256i)b);
}
inline Dwords unpack_high_64(Dwords a, Dwords b) {
    return (Dwords)_mm256_unpackhi_epi64((__m256i)a, (__m256i)b);
}
// A byte, or a nibble (the low one first), in every lane; above a nibble anything.
inline Dwords load_bytes(const uint8_t* from) {
    return (Dwords)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
}
inline Dwords load_nibbles(const uint8_t* from) {
    int32_t few;
    memcpy(&few, from, sizeof(few));
    return (Dwords)_mm256_srlv_epi32(_mm256_set1_epi32(few), _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
}
inline bool any_bit(Dwords v) { return !_mm256_testz_si256((__m256i)v, (__m256i)v); }
// E4M3 as IEEE halves with the same bits, so 2^-8 of the values; not for NaN.
inline Vec fp8_values(const uint8_t* from) {
    const __m128i words = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
    return _mm256_cvtph_ps(
        _mm_and_si128(_mm_slli_epi16(words, 7), _mm_set1_epi16(static_cast<int16_t>(0xbf80))));
}
// The same of byte j of every lane: put(j, values).
template <class Put>
[[gnu::always_inline]] inline void fp8_values(Dwords v, const Put& put) {
    const __m256i in_lanes =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8((__m256i)v, in_lanes),
                                                      _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
        const __m128i two = half == 0 ? _mm256_castsi256_si128(bytes) : _mm256_extracti128_si256(bytes, 1);
        const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(two), 7),
                                                _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));
        put(2 * half, _mm256_cvtph_ps(_mm256_castsi256_si128(halves)));
        put(2 * half + 1, _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)));
    }
}
// Integers less 8, and E2M1, in bits 0 to 3 of each lane.
inline Vec int4_values(Dwords v) { return _mm256_cvtepi32_ps((__m256i)(v & 15u)) - 8.0f; }
inline Vec fp4_values(Dwords v) {
    const __m256 magnitudes = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
    const __m256 f = _mm256_permutevar8x32_ps(magnitudes, (__m256i)v);
    return _mm256_or_ps(f, (__m256)(v << 28 & 0x80000000u));
}

// Pairs of 16 bits, or int32 sums.
using IVec = __m256i;
inline IVec iload(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void istore(void* p, IVec v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
inline IVec iset1(int32_t v) { return _mm256_set1_epi32(v); }
inline Vec ifloat(IVec v) { return _mm256_cvtepi32_ps(v); }
inline IVec idot(IVec sum, IVec panel, IVec left) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(panel, left));
}

#include "generic/vector.inl"
#include "generic/formats.inl"
#include "generic/micro_f32.inl"
#include "generic/panels.inl"
#include "generic/rows.inl"

// Of isa/avx_rows.inl.
using Words = uint16_t __attribute__((vector_size(32)));
using SignedWords = int16_t __attribute__((vector_size(32)));
inline Words words_at(const uint8_t* p) { return (Words)iload(p); }
// 16 bytes each of blocks `step` bytes apart.
inline Words words_of_blocks(const uint8_t* p, int64_t step) {
    const __m128i* low = reinterpret_cast<const __m128i*>(p);
    const __m128i* high = reinterpret_cast<const __m128i*>(p + step);
    return (Words)_mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(low)), _mm_loadu_si128(high),
                                          1);
}
inline Words larger_bytes(Words a, Words b) { return (Words)_mm256_max_epu8((__m256i)a, (__m256i)b); }
inline bool any_byte(Words v, char byte) {
    return _mm256_movemask_epi8(_mm256_cmpeq_epi8((__m256i)v, _mm256_set1_epi8(byte))) != 0;
}
inline Words looked_up(__m128i table, Words nibbles) {
    return (Words)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), (__m256i)nibbles);
}
// Words with 0x41 above the bytes of half h of each 128 bits.
[[gnu::always_inline]] inline Words below_0x41(Words bytes, int h) {
    const __m256i v = (__m256i)bytes, above = _mm256_set1_epi8(0x41);
    return (Words)(h == 0 ? _mm256_unpacklo_epi8(v, above) : _mm256_unpackhi_epi8(v, above));
}
// Half h of a register of IEEE halves.
inline Vec half_values(Words v, int h) {
    return _mm256_cvtph_ps(h == 0 ? _mm256_castsi256_si128((__m256i)v)
                                  : _mm256_extracti128_si256((__m256i)v, 1));
}
inline Vec signed_bytes(const uint8_t* p) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
}
inline float half_value(const uint8_t* p) { return _cvtsh_ss(load_as<uint16_t>(p)); }
inline Vec load_halves(const uint8_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
// Two scales, four lanes each.
inline Vec group_scales(const float* two) {
    const __m256d both = _mm256_set1_pd(load_as<double>(reinterpret_cast<const uint8_t*>(two)));
    return _mm256_permutevar_ps(_mm256_castpd_ps(both), _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1));
}
inline Vec sub_block_scales(const float* scale) { return vset1(*scale); }

#include "isa/avx_rows.inl"
#include "generic/ahead.inl"
#include "generic/units.inl"
#include "generic/pieces.inl"
#include "generic/activation.inl"
#include "generic/int8.inl"
#include "generic/micro_int8.inl"
#include "generic/moe.inl"

}  // namespace

const Kernels f32 = Entry<float, ComputeF32Ahead>::kernels;
const Kernels bf16 = Entry<Bf16, ComputeF32Ahead>::kernels;
const Kernels int8 = Entry<Bf16, ComputeInt8<ComputeF32, MicroInt8<int16_t, 0>, MicroNibbles<int16_t>,
                                             PlainInt8Ahead<0, int16_t>>>::kernels;

}  // namespace kt::avx2
