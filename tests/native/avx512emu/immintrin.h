// AVX-512 intrinsics in AVX2. Found before the compiler's own <immintrin.h>, this header lets the kernels of
// isa/avx512*.cpp and isa/amx.cpp be compiled for, and run on, a CPU with AVX2 and FMA. Each function
// computes what Intel's manual says of its instruction, bit for bit. Only those that the kernels call are
// here: any other ends the compilation, since the compiler's own needs flags that are not given.
#pragma once
#include_next <immintrin.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

#if defined(__AVX512F__)
#error "compile with -mavx2 -mfma -mf16c alone"
#endif

namespace {
namespace emulated {

using I8 = int8_t __attribute__((vector_size(64)));
using U8 = uint8_t __attribute__((vector_size(64)));
using I16 = int16_t __attribute__((vector_size(64)));
using U16 = uint16_t __attribute__((vector_size(64)));
using I32 = int32_t __attribute__((vector_size(64)));
using U32 = uint32_t __attribute__((vector_size(64)));
using I64 = int64_t __attribute__((vector_size(64)));

// Half or quarter n of a register, and registers of them.
inline __m256i half(__m512i v, int n) {
    __m256i r;
    memcpy(&r, reinterpret_cast<const char*>(&v) + 32 * n, sizeof(r));
    return r;
}
inline __m256 half(__m512 v, int n) { return (__m256)half((__m512i)v, n); }
inline __m128i quarter(__m512i v, int n) {
    __m128i r;
    memcpy(&r, reinterpret_cast<const char*>(&v) + 16 * n, sizeof(r));
    return r;
}
inline __m512i join(__m256i a, __m256i b) {
    __m512i r;
    memcpy(&r, &a, sizeof(a));
    memcpy(reinterpret_cast<char*>(&r) + 32, &b, sizeof(b));
    return r;
}
inline __m512 join(__m256 a, __m256 b) { return (__m512)join((__m256i)a, (__m256i)b); }
inline __m512i join(__m128i a, __m128i b, __m128i c, __m128i d) {
    return join(_mm256_set_m128i(b, a), _mm256_set_m128i(d, c));
}

// Element n of a register of type To is of(n).
template <class To, class Of>
inline To each(const Of& of) {
    To r{};
    for (size_t n = 0; n < sizeof(To) / sizeof(r[0]); ++n) r[n] = of(n);
    return r;
}

// Both halves through an intrinsic of AVX2.
#define HALVES(type, name, of_256)                                                   \
    inline type name(type a, type b) {                                               \
        return join(of_256(half(a, 0), half(b, 0)), of_256(half(a, 1), half(b, 1))); \
    }
HALVES(__m512, add_ps, _mm256_add_ps)
HALVES(__m512, sub_ps, _mm256_sub_ps)
HALVES(__m512, mul_ps, _mm256_mul_ps)
HALVES(__m512i, and_si512, _mm256_and_si256)
HALVES(__m512i, or_si512, _mm256_or_si256)
HALVES(__m512i, xor_si512, _mm256_xor_si256)
HALVES(__m512i, add_epi16, _mm256_add_epi16)
HALVES(__m512i, add_epi32, _mm256_add_epi32)
HALVES(__m512i, sub_epi16, _mm256_sub_epi16)
HALVES(__m512i, sub_epi32, _mm256_sub_epi32)
HALVES(__m512i, mullo_epi32, _mm256_mullo_epi32)
HALVES(__m512i, madd_epi16, _mm256_madd_epi16)
HALVES(__m512i, max_epu8, _mm256_max_epu8)
HALVES(__m512i, srlv_epi32, _mm256_srlv_epi32)
HALVES(__m512i, shuffle_epi8, _mm256_shuffle_epi8)
HALVES(__m512i, unpacklo_epi8, _mm256_unpacklo_epi8)
HALVES(__m512i, unpackhi_epi8, _mm256_unpackhi_epi8)
HALVES(__m512i, unpacklo_epi16, _mm256_unpacklo_epi16)
HALVES(__m512i, unpackhi_epi16, _mm256_unpackhi_epi16)
HALVES(__m512i, unpacklo_epi32, _mm256_unpacklo_epi32)
HALVES(__m512i, unpackhi_epi32, _mm256_unpackhi_epi32)
HALVES(__m512i, unpacklo_epi64, _mm256_unpacklo_epi64)
HALVES(__m512i, unpackhi_epi64, _mm256_unpackhi_epi64)
#undef HALVES

inline __m512 fmadd_ps(__m512 a, __m512 b, __m512 c) {
    return join(_mm256_fmadd_ps(half(a, 0), half(b, 0), half(c, 0)),
                _mm256_fmadd_ps(half(a, 1), half(b, 1), half(c, 1)));
}
inline __m512 fnmadd_ps(__m512 a, __m512 b, __m512 c) {
    return join(_mm256_fnmadd_ps(half(a, 0), half(b, 0), half(c, 0)),
                _mm256_fnmadd_ps(half(a, 1), half(b, 1), half(c, 1)));
}
inline __m512 permutevar_ps(__m512 v, __m512i n) {
    return join(_mm256_permutevar_ps(half(v, 0), half(n, 0)), _mm256_permutevar_ps(half(v, 1), half(n, 1)));
}

// Memory. What is to be aligned is looked at, as the instructions do.
inline __m512i loadu_si512(const void* p) {
    __m512i r;
    memcpy(&r, p, sizeof(r));
    return r;
}
inline void storeu_si512(void* p, __m512i v) { memcpy(p, &v, sizeof(v)); }
inline __m512 loadu_ps(const void* p) { return (__m512)loadu_si512(p); }
inline void storeu_ps(void* p, __m512 v) { storeu_si512(p, (__m512i)v); }
inline __m512i load_si512(const void* p) {
    if (reinterpret_cast<uintptr_t>(p) % 64 != 0) abort();
    return loadu_si512(p);
}
inline __m512 load_ps(const void* p) { return (__m512)load_si512(p); }
// Elements outside the mask are not read.
template <class To, class Element>
inline To masked_load(uint64_t mask, const void* p) {
    To r{};
    for (size_t n = 0; n < sizeof(To) / sizeof(Element); ++n)
        if (mask >> n & 1)
            memcpy(reinterpret_cast<char*>(&r) + n * sizeof(Element),
                   static_cast<const char*>(p) + n * sizeof(Element), sizeof(Element));
    return r;
}
inline __m512 maskz_loadu_ps(__mmask16 mask, const void* p) { return masked_load<__m512, float>(mask, p); }
inline __m256i maskz_loadu_epi16_256(__mmask16 mask, const void* p) {
    return masked_load<__m256i, int16_t>(mask, p);
}
inline __m128i maskz_loadu_epi8_128(__mmask16 mask, const void* p) {
    return masked_load<__m128i, int8_t>(mask, p);
}

// Constants and broadcasts.
inline __m512i setzero_si512() { return __m512i{}; }
inline __m512 setzero_ps() { return __m512{}; }
inline __m512i set1_epi8(int v) { return (__m512i)(I8{} + static_cast<int8_t>(v)); }
inline __m512i set1_epi16(int v) { return (__m512i)(I16{} + static_cast<int16_t>(v)); }
inline __m512i set1_epi32(int32_t v) { return (__m512i)(I32{} + v); }
inline __m512i set1_epi64(int64_t v) { return (__m512i)(I64{} + v); }
inline __m512 set1_ps(float v) { return (__m512)set1_epi32(__builtin_bit_cast(int32_t, v)); }
template <class... Values>
inline __m512i setr_epi32(Values... values) {
    return (__m512i)I32{static_cast<int32_t>(values)...};
}
template <class... Values>
inline __m512i setr_epi64(Values... values) {
    return (__m512i)I64{static_cast<int64_t>(values)...};
}
template <class... Values>
inline __m512 setr_ps(Values... values) {
    return __m512{static_cast<float>(values)...};
}
inline __m512i broadcast_i32x4(__m128i v) { return join(v, v, v, v); }
inline __m512 broadcast_f32x4(__m128 v) { return (__m512)broadcast_i32x4((__m128i)v); }
inline __m512 broadcastss_ps(__m128 v) { return set1_ps(v[0]); }

// Halves and quarters. What a cast leaves undefined is noise here.
constexpr int32_t kNoise = 0x7fc5a5a5;
inline __m512 castsi512_ps(__m512i v) { return (__m512)v; }
inline __m256i castsi512_si256(__m512i v) { return half(v, 0); }
inline __m256 castps512_ps256(__m512 v) { return half(v, 0); }
inline __m512i castsi256_si512(__m256i v) { return join(v, _mm256_set1_epi32(kNoise)); }
inline __m512 castps256_ps512(__m256 v) { return (__m512)castsi256_si512((__m256i)v); }
inline __m512i castsi128_si512(__m128i v) {
    const __m128i noise = _mm_set1_epi32(kNoise);
    return join(v, noise, noise, noise);
}
inline __m512 castps128_ps512(__m128 v) { return (__m512)castsi128_si512((__m128i)v); }
inline __m512i inserti32x4(__m512i v, __m128i part, int n) {
    return join(n == 0 ? part : quarter(v, 0), n == 1 ? part : quarter(v, 1), n == 2 ? part : quarter(v, 2),
                n == 3 ? part : quarter(v, 3));
}
inline __m512i inserti64x4(__m512i v, __m256i part, int n) {
    return n == 0 ? join(part, half(v, 1)) : join(half(v, 0), part);
}
inline __m256i extracti64x4_epi64(__m512i v, int n) { return half(v, n); }
inline __m256 extractf32x8_ps(__m512 v, int n) { return half(v, n); }
inline __m512i shuffle_i32x4(__m512i a, __m512i b, int n) {
    return join(quarter(a, n & 3), quarter(a, n >> 2 & 3), quarter(b, n >> 4 & 3), quarter(b, n >> 6 & 3));
}
inline __m512i shuffle_i64x2(__m512i a, __m512i b, int n) { return shuffle_i32x4(a, b, n); }

// Shifts: all bits out where the count reaches the width.
inline __m512i slli_epi32(__m512i v, unsigned n) { return n > 31 ? __m512i{} : (__m512i)((U32)v << n); }
inline __m512i srli_epi32(__m512i v, unsigned n) { return n > 31 ? __m512i{} : (__m512i)((U32)v >> n); }
inline __m512i slli_epi16(__m512i v, unsigned n) {
    return join(_mm256_slli_epi16(half(v, 0), static_cast<int>(n)),
                _mm256_slli_epi16(half(v, 1), static_cast<int>(n)));
}
inline __m512i srli_epi16(__m512i v, unsigned n) {
    return join(_mm256_srli_epi16(half(v, 0), static_cast<int>(n)),
                _mm256_srli_epi16(half(v, 1), static_cast<int>(n)));
}
inline __m512i srl_epi16(__m512i v, __m128i n) {
    return join(_mm256_srl_epi16(half(v, 0), n), _mm256_srl_epi16(half(v, 1), n));
}
inline __m256i rolv_epi32_256(__m256i v, __m256i n) {
    using Few = uint32_t __attribute__((vector_size(32)));
    const Few bits = (Few)v, by = (Few)n & 31;
    return (__m256i)(bits << by | bits >> (-by & 31));
}

// Permutations across the register.
inline __m512i permutexvar_epi32(__m512i n, __m512i v) {
    return (__m512i)each<I32>([&](size_t i) { return ((I32)v)[((U32)n)[i] & 15]; });
}
inline __m512 permutexvar_ps(__m512i n, __m512 v) { return (__m512)permutexvar_epi32(n, (__m512i)v); }
inline __m512i permutexvar_epi16(__m512i n, __m512i v) {
    return (__m512i)each<I16>([&](size_t i) { return ((I16)v)[((U16)n)[i] & 31]; });
}
inline __m512i permutex2var_epi8(__m512i a, __m512i n, __m512i b) {
    return (__m512i)each<U8>([&](size_t i) {
        const unsigned from = ((U8)n)[i];
        return (from & 64 ? (U8)b : (U8)a)[from & 63];
    });
}
inline __m512i permutex2var_epi16(__m512i a, __m512i n, __m512i b) {
    return (__m512i)each<U16>([&](size_t i) {
        const unsigned from = ((U16)n)[i];
        return (from & 32 ? (U16)b : (U16)a)[from & 31];
    });
}
inline __m512 permutex2var_ps(__m512 a, __m512i n, __m512 b) {
    return each<__m512>([&](size_t i) {
        const unsigned from = static_cast<unsigned>(((I32)n)[i]);
        return (from & 16 ? b : a)[from & 15];
    });
}
inline __m512i permutex2var_epi64(__m512i a, __m512i n, __m512i b) {
    return (__m512i)each<I64>([&](size_t i) {
        const unsigned from = static_cast<unsigned>(((I64)n)[i]);
        return (from & 8 ? (I64)b : (I64)a)[from & 7];
    });
}

// Conversions.
inline __m512 cvtph_ps(__m256i v) {
    return join(_mm256_cvtph_ps(_mm256_castsi256_si128(v)), _mm256_cvtph_ps(_mm256_extracti128_si256(v, 1)));
}
inline __m512 cvtepi32_ps(__m512i v) {
    return join(_mm256_cvtepi32_ps(half(v, 0)), _mm256_cvtepi32_ps(half(v, 1)));
}
inline __m512i cvtps_epi32(__m512 v) {
    return join(_mm256_cvtps_epi32(half(v, 0)), _mm256_cvtps_epi32(half(v, 1)));
}
inline __m128i cvtepi32_epi8(__m512i v) {
    __m128i r;
    for (size_t n = 0; n < 16; ++n) reinterpret_cast<int8_t*>(&r)[n] = static_cast<int8_t>(((I32)v)[n]);
    return r;
}
inline __m512i cvtepu8_epi32(__m128i v) {
    return join(_mm256_cvtepu8_epi32(v), _mm256_cvtepu8_epi32(_mm_srli_si128(v, 8)));
}
inline __m512i cvtepi8_epi32(__m128i v) {
    return join(_mm256_cvtepi8_epi32(v), _mm256_cvtepi8_epi32(_mm_srli_si128(v, 8)));
}
inline __m512i cvtepu16_epi32(__m256i v) {
    return join(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(v)),
                _mm256_cvtepu16_epi32(_mm256_extracti128_si256(v, 1)));
}
inline __m512i cvtepu8_epi16(__m256i v) {
    return join(_mm256_cvtepu8_epi16(_mm256_castsi256_si128(v)),
                _mm256_cvtepu8_epi16(_mm256_extracti128_si256(v, 1)));
}
inline __m512i cvtepi8_epi16(__m256i v) {
    return join(_mm256_cvtepi8_epi16(_mm256_castsi256_si128(v)),
                _mm256_cvtepi8_epi16(_mm256_extracti128_si256(v, 1)));
}

// Logic, comparisons and masks. Bit a * 4 + b * 2 + c of the table is the result's.
template <class V>
inline V ternary(V a, V b, V c, int table) {
    V r = a ^ a;
    for (int n = 0; n < 8; ++n)
        if (table >> n & 1) r |= (n & 4 ? a : ~a) & (n & 2 ? b : ~b) & (n & 1 ? c : ~c);
    return r;
}
inline __m512i ternarylogic_epi32(__m512i a, __m512i b, __m512i c, int table) {
    return ternary(a, b, c, table);
}
inline __m256i ternarylogic_epi32_256(__m256i a, __m256i b, __m256i c, int table) {
    return ternary(a, b, c, table);
}
template <class V>
inline uint64_t mask_of(V truth) {
    uint64_t r = 0;
    for (size_t n = 0; n < sizeof(V) / sizeof(truth[0]); ++n) r |= static_cast<uint64_t>(truth[n] != 0) << n;
    return r;
}
inline __mmask16 cmplt_epu32_mask(__m512i a, __m512i b) {
    return static_cast<__mmask16>(mask_of((U32)a < (U32)b));
}
inline __mmask16 test_epi32_mask(__m512i a, __m512i b) {
    return static_cast<__mmask16>(mask_of((I32)(a & b)));
}
inline __mmask64 cmpeq_epi8_mask(__m512i a, __m512i b) { return mask_of((I8)a == (I8)b); }
inline __mmask32 test_epi8_mask_256(__m256i a, __m256i b) {
    using Few = int8_t __attribute__((vector_size(32)));
    return static_cast<__mmask32>(mask_of((Few)(a & b)));
}
template <class V>
inline V blend(uint64_t mask, V a, V b) {
    return each<V>([&](size_t n) { return mask >> n & 1 ? b[n] : a[n]; });
}
inline __m512 mask_blend_ps(__mmask16 mask, __m512 a, __m512 b) { return blend(mask, a, b); }
inline __m512i mask_blend_epi8(__mmask64 mask, __m512i a, __m512i b) {
    return (__m512i)blend(mask, (I8)a, (I8)b);
}
inline __m512i mask_or_epi32(__m512i otherwise, __mmask16 mask, __m512i a, __m512i b) {
    return (__m512i)blend(mask, (I32)otherwise, (I32)(a | b));
}
inline __m512i mask_add_epi16(__m512i otherwise, __mmask32 mask, __m512i a, __m512i b) {
    return (__m512i)blend(mask, (I16)otherwise, (I16)add_epi16(a, b));
}
inline __m512i maskz_set1_epi32(__mmask16 mask, int v) {
    return (__m512i)blend(mask, I32{}, (I32)set1_epi32(v));
}
// In the order of gcc's own: halves, quarters, pairs, and the last two.
inline float mask_reduce_add_ps(__mmask16 mask, __m512 v) {
    const __m512 some = blend(mask, __m512{}, v);
    const __m256 eight = _mm256_add_ps(half(some, 1), half(some, 0));
    const __m128 four = _mm_add_ps(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight));
    return (four[0] + four[2]) + (four[1] + four[3]);
}

// VNNI: four products of an unsigned and a signed byte, exact, modulo 2^32.
inline __m512i dpbusd_epi32(__m512i sum, __m512i a, __m512i b) {
    return (__m512i)each<U32>([&](size_t n) {
        uint32_t r = ((U32)sum)[n];
        for (size_t k = 4 * n; k < 4 * n + 4; ++k)
            r += static_cast<uint32_t>(int32_t{((U8)a)[k]} * int32_t{((I8)b)[k]});
        return r;
    });
}

// AVX512_BF16. Denormal inputs and results count as zeros, MXCSR asks or not; the odd product of a pair is
// added first, both fused.
inline __m512 flushed(__m512 v) {
    const I32 bits = (I32)v, is_small = (bits & 0x7f800000) == 0;
    return (__m512)(bits & ~(is_small & 0x7fffffff));
}
inline __m512 dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
    const I32 x = (I32)a, y = (I32)b, upper = I32{} + static_cast<int32_t>(0xffff0000u);
    sum = flushed(fmadd_ps(flushed((__m512)(x & upper)), flushed((__m512)(y & upper)), flushed(sum)));
    return flushed(fmadd_ps(flushed((__m512)(x << 16)), flushed((__m512)(y << 16)), sum));
}
inline uint16_t bf16_of(uint32_t bits) {
    const uint32_t magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 0x40);
    if (magnitude < 0x00800000) return static_cast<uint16_t>(bits >> 16 & 0x8000);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline __m256bh cvtneps_pbh(__m512 v) {
    using Few = uint16_t __attribute__((vector_size(32)));
    return (__m256bh)each<Few>([&](size_t n) { return bf16_of(((U32)v)[n]); });
}
// The second argument's in the lower half.
inline __m512bh cvtne2ps_pbh(__m512 a, __m512 b) {
    return (__m512bh)join((__m256i)cvtneps_pbh(b), (__m256i)cvtneps_pbh(a));
}

}  // namespace emulated
}  // namespace

#undef _mm512_add_epi16
#define _mm512_add_epi16 emulated::add_epi16
#undef _mm512_add_epi32
#define _mm512_add_epi32 emulated::add_epi32
#undef _mm512_add_ps
#define _mm512_add_ps emulated::add_ps
#undef _mm512_and_si512
#define _mm512_and_si512 emulated::and_si512
#undef _mm512_broadcast_f32x4
#define _mm512_broadcast_f32x4 emulated::broadcast_f32x4
#undef _mm512_broadcast_i32x4
#define _mm512_broadcast_i32x4 emulated::broadcast_i32x4
#undef _mm512_broadcastss_ps
#define _mm512_broadcastss_ps emulated::broadcastss_ps
#undef _mm512_castps128_ps512
#define _mm512_castps128_ps512 emulated::castps128_ps512
#undef _mm512_castps256_ps512
#define _mm512_castps256_ps512 emulated::castps256_ps512
#undef _mm512_castps512_ps256
#define _mm512_castps512_ps256 emulated::castps512_ps256
#undef _mm512_castsi128_si512
#define _mm512_castsi128_si512 emulated::castsi128_si512
#undef _mm512_castsi256_si512
#define _mm512_castsi256_si512 emulated::castsi256_si512
#undef _mm512_castsi512_ps
#define _mm512_castsi512_ps emulated::castsi512_ps
#undef _mm512_castsi512_si256
#define _mm512_castsi512_si256 emulated::castsi512_si256
#undef _mm512_cmpeq_epi8_mask
#define _mm512_cmpeq_epi8_mask emulated::cmpeq_epi8_mask
#undef _mm512_cmplt_epu32_mask
#define _mm512_cmplt_epu32_mask emulated::cmplt_epu32_mask
#undef _mm512_cvtepi32_epi8
#define _mm512_cvtepi32_epi8 emulated::cvtepi32_epi8
#undef _mm512_cvtepi32_ps
#define _mm512_cvtepi32_ps emulated::cvtepi32_ps
#undef _mm512_cvtepi8_epi16
#define _mm512_cvtepi8_epi16 emulated::cvtepi8_epi16
#undef _mm512_cvtepi8_epi32
#define _mm512_cvtepi8_epi32 emulated::cvtepi8_epi32
#undef _mm512_cvtepu16_epi32
#define _mm512_cvtepu16_epi32 emulated::cvtepu16_epi32
#undef _mm512_cvtepu8_epi16
#define _mm512_cvtepu8_epi16 emulated::cvtepu8_epi16
#undef _mm512_cvtepu8_epi32
#define _mm512_cvtepu8_epi32 emulated::cvtepu8_epi32
#undef _mm512_cvtne2ps_pbh
#define _mm512_cvtne2ps_pbh emulated::cvtne2ps_pbh
#undef _mm512_cvtneps_pbh
#define _mm512_cvtneps_pbh emulated::cvtneps_pbh
#undef _mm512_cvtph_ps
#define _mm512_cvtph_ps emulated::cvtph_ps
#undef _mm512_cvtps_epi32
#define _mm512_cvtps_epi32 emulated::cvtps_epi32
#undef _mm512_dpbf16_ps
#define _mm512_dpbf16_ps emulated::dpbf16_ps
#undef _mm512_dpbusd_epi32
#define _mm512_dpbusd_epi32 emulated::dpbusd_epi32
#undef _mm512_extractf32x8_ps
#define _mm512_extractf32x8_ps emulated::extractf32x8_ps
#undef _mm512_extracti64x4_epi64
#define _mm512_extracti64x4_epi64 emulated::extracti64x4_epi64
#undef _mm512_fmadd_ps
#define _mm512_fmadd_ps emulated::fmadd_ps
#undef _mm512_fnmadd_ps
#define _mm512_fnmadd_ps emulated::fnmadd_ps
#undef _mm512_inserti32x4
#define _mm512_inserti32x4 emulated::inserti32x4
#undef _mm512_inserti64x4
#define _mm512_inserti64x4 emulated::inserti64x4
#undef _mm512_load_ps
#define _mm512_load_ps emulated::load_ps
#undef _mm512_load_si512
#define _mm512_load_si512 emulated::load_si512
#undef _mm512_loadu_ps
#define _mm512_loadu_ps emulated::loadu_ps
#undef _mm512_loadu_si512
#define _mm512_loadu_si512 emulated::loadu_si512
#undef _mm512_madd_epi16
#define _mm512_madd_epi16 emulated::madd_epi16
#undef _mm512_mask_add_epi16
#define _mm512_mask_add_epi16 emulated::mask_add_epi16
#undef _mm512_mask_blend_epi8
#define _mm512_mask_blend_epi8 emulated::mask_blend_epi8
#undef _mm512_mask_blend_ps
#define _mm512_mask_blend_ps emulated::mask_blend_ps
#undef _mm512_mask_or_epi32
#define _mm512_mask_or_epi32 emulated::mask_or_epi32
#undef _mm512_mask_reduce_add_ps
#define _mm512_mask_reduce_add_ps emulated::mask_reduce_add_ps
#undef _mm256_maskz_loadu_epi16
#define _mm256_maskz_loadu_epi16 emulated::maskz_loadu_epi16_256
#undef _mm_maskz_loadu_epi8
#define _mm_maskz_loadu_epi8 emulated::maskz_loadu_epi8_128
#undef _mm512_maskz_loadu_ps
#define _mm512_maskz_loadu_ps emulated::maskz_loadu_ps
#undef _mm512_maskz_set1_epi32
#define _mm512_maskz_set1_epi32 emulated::maskz_set1_epi32
#undef _mm512_max_epu8
#define _mm512_max_epu8 emulated::max_epu8
#undef _mm512_mul_ps
#define _mm512_mul_ps emulated::mul_ps
#undef _mm512_mullo_epi32
#define _mm512_mullo_epi32 emulated::mullo_epi32
#undef _mm512_or_si512
#define _mm512_or_si512 emulated::or_si512
#undef _mm512_permutevar_ps
#define _mm512_permutevar_ps emulated::permutevar_ps
#undef _mm512_permutex2var_epi16
#define _mm512_permutex2var_epi16 emulated::permutex2var_epi16
#undef _mm512_permutex2var_epi64
#define _mm512_permutex2var_epi64 emulated::permutex2var_epi64
#undef _mm512_permutex2var_epi8
#define _mm512_permutex2var_epi8 emulated::permutex2var_epi8
#undef _mm512_permutex2var_ps
#define _mm512_permutex2var_ps emulated::permutex2var_ps
#undef _mm512_permutexvar_epi16
#define _mm512_permutexvar_epi16 emulated::permutexvar_epi16
#undef _mm512_permutexvar_epi32
#define _mm512_permutexvar_epi32 emulated::permutexvar_epi32
#undef _mm512_permutexvar_ps
#define _mm512_permutexvar_ps emulated::permutexvar_ps
#undef _mm256_rolv_epi32
#define _mm256_rolv_epi32 emulated::rolv_epi32_256
#undef _mm512_set1_epi16
#define _mm512_set1_epi16 emulated::set1_epi16
#undef _mm512_set1_epi32
#define _mm512_set1_epi32 emulated::set1_epi32
#undef _mm512_set1_epi64
#define _mm512_set1_epi64 emulated::set1_epi64
#undef _mm512_set1_epi8
#define _mm512_set1_epi8 emulated::set1_epi8
#undef _mm512_set1_ps
#define _mm512_set1_ps emulated::set1_ps
#undef _mm512_setr_epi32
#define _mm512_setr_epi32 emulated::setr_epi32
#undef _mm512_setr_epi64
#define _mm512_setr_epi64 emulated::setr_epi64
#undef _mm512_setr_ps
#define _mm512_setr_ps emulated::setr_ps
#undef _mm512_setzero_ps
#define _mm512_setzero_ps emulated::setzero_ps
#undef _mm512_setzero_si512
#define _mm512_setzero_si512 emulated::setzero_si512
#undef _mm512_shuffle_epi8
#define _mm512_shuffle_epi8 emulated::shuffle_epi8
#undef _mm512_shuffle_i32x4
#define _mm512_shuffle_i32x4 emulated::shuffle_i32x4
#undef _mm512_shuffle_i64x2
#define _mm512_shuffle_i64x2 emulated::shuffle_i64x2
#undef _mm512_slli_epi16
#define _mm512_slli_epi16 emulated::slli_epi16
#undef _mm512_slli_epi32
#define _mm512_slli_epi32 emulated::slli_epi32
#undef _mm512_srl_epi16
#define _mm512_srl_epi16 emulated::srl_epi16
#undef _mm512_srli_epi16
#define _mm512_srli_epi16 emulated::srli_epi16
#undef _mm512_srli_epi32
#define _mm512_srli_epi32 emulated::srli_epi32
#undef _mm512_srlv_epi32
#define _mm512_srlv_epi32 emulated::srlv_epi32
#undef _mm512_storeu_ps
#define _mm512_storeu_ps emulated::storeu_ps
#undef _mm512_storeu_si512
#define _mm512_storeu_si512 emulated::storeu_si512
#undef _mm512_sub_epi16
#define _mm512_sub_epi16 emulated::sub_epi16
#undef _mm512_sub_epi32
#define _mm512_sub_epi32 emulated::sub_epi32
#undef _mm512_sub_ps
#define _mm512_sub_ps emulated::sub_ps
#undef _mm512_ternarylogic_epi32
#define _mm512_ternarylogic_epi32 emulated::ternarylogic_epi32
#undef _mm256_ternarylogic_epi32
#define _mm256_ternarylogic_epi32 emulated::ternarylogic_epi32_256
#undef _mm512_test_epi32_mask
#define _mm512_test_epi32_mask emulated::test_epi32_mask
#undef _mm256_test_epi8_mask
#define _mm256_test_epi8_mask emulated::test_epi8_mask_256
#undef _mm512_unpackhi_epi16
#define _mm512_unpackhi_epi16 emulated::unpackhi_epi16
#undef _mm512_unpackhi_epi32
#define _mm512_unpackhi_epi32 emulated::unpackhi_epi32
#undef _mm512_unpackhi_epi64
#define _mm512_unpackhi_epi64 emulated::unpackhi_epi64
#undef _mm512_unpackhi_epi8
#define _mm512_unpackhi_epi8 emulated::unpackhi_epi8
#undef _mm512_unpacklo_epi16
#define _mm512_unpacklo_epi16 emulated::unpacklo_epi16
#undef _mm512_unpacklo_epi32
#define _mm512_unpacklo_epi32 emulated::unpacklo_epi32
#undef _mm512_unpacklo_epi64
#define _mm512_unpacklo_epi64 emulated::unpacklo_epi64
#undef _mm512_unpacklo_epi8
#define _mm512_unpacklo_epi8 emulated::unpacklo_epi8
#undef _mm512_xor_si512
#define _mm512_xor_si512 emulated::xor_si512
