// Shared by the AVX-512 instruction sets.

constexpr int64_t kLanes = 16;
constexpr int64_t kMaxRowsF32 = 10;

using Vec = __m512;
inline Vec vload(const float* p) { return _mm512_loadu_ps(p); }
inline Vec vload(const Bf16* p) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
inline void vstore(float* p, Vec v) { _mm512_storeu_ps(p, v); }
inline Vec vset1(float v) { return _mm512_set1_ps(v); }
inline Vec vfma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
// sum + a * b in the register where it is: left to itself the compiler moves sums about, and to the stack.
inline Vec vadd_product(Vec sum, Vec a, Vec b) {
    __asm__("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
}

// Transposes 16 vectors of 16 dwords: put(k, dwords k of all of them).
template <class Put>
[[gnu::always_inline]] inline void transpose_dwords(__m512i a[16], const Put& put) {
    __m512i b[16];
    for (int n = 0; n < 16; n += 2) {
        b[n] = _mm512_unpacklo_epi32(a[n], a[n + 1]);
        b[n + 1] = _mm512_unpackhi_epi32(a[n], a[n + 1]);
    }
    // a[4 q + k] holds, in each 128-bit lane L, dword 4 L + k of rows 4 q .. 4 q + 3.
    for (int q = 0; q < 16; q += 4)
        for (int half = 0; half < 2; ++half) {
            a[q + 2 * half] = _mm512_unpacklo_epi64(b[q + half], b[q + 2 + half]);
            a[q + 2 * half + 1] = _mm512_unpackhi_epi64(b[q + half], b[q + 2 + half]);
        }
    for (int k = 0; k < 4; ++k) {
        const __m512i even01 = _mm512_shuffle_i32x4(a[k], a[4 + k], 0x88);
        const __m512i odd01 = _mm512_shuffle_i32x4(a[k], a[4 + k], 0xdd);
        const __m512i even23 = _mm512_shuffle_i32x4(a[8 + k], a[12 + k], 0x88);
        const __m512i odd23 = _mm512_shuffle_i32x4(a[8 + k], a[12 + k], 0xdd);
        put(k, _mm512_shuffle_i32x4(even01, even23, 0x88));
        put(4 + k, _mm512_shuffle_i32x4(odd01, odd23, 0x88));
        put(8 + k, _mm512_shuffle_i32x4(even01, even23, 0xdd));
        put(12 + k, _mm512_shuffle_i32x4(odd01, odd23, 0xdd));
    }
}

// Row k of the transpose at to + k * step (in bytes).
inline void store_transposed(__m512i a[16], char* to, int64_t step) {
    transpose_dwords(a, [&](int k, __m512i v) { _mm512_storeu_si512(to + k * step, v); });
}

// to[k * step + n] = from[n * ld + k] for a square of kLanes.
inline void transpose_block(const float* from, int64_t ld, float* to, int64_t step) {
    __m512i a[16];
    for (int n = 0; n < 16; ++n) a[n] = _mm512_loadu_si512(from + n * ld);
    store_transposed(a, reinterpret_cast<char*>(to), step * static_cast<int64_t>(sizeof(float)));
}

using Dwords = uint32_t __attribute__((vector_size(64)));
// 16 bytes of rows 0, 4, 8, 12 in the 128-bit lanes.
inline Dwords load_lanes(const uint8_t* from, int64_t row_bytes) {
    const auto row = [&](int64_t n) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + n * row_bytes));
    };
    __m512i v = _mm512_inserti32x4(_mm512_castsi128_si512(row(0)), row(4), 1);
    v = _mm512_inserti32x4(v, row(8), 2);
    return (Dwords)_mm512_inserti32x4(v, row(12), 3);
}
inline Dwords unpack_low_32(Dwords a, Dwords b) {
    return (Dwords)_mm512_unpacklo_epi32((__m512i)a, (__m512i)b);
}
inline Dwords unpack_high_32(Dwords a, Dwords b) {
    return (Dwords)_mm512_unpackhi_epi32((__m512i)a, (__m512i)b);
}
inline Dwords unpack_low_64(Dwords a, Dwords b) {
    return (Dwords)_mm512_unpacklo_epi64((__m512i)a, (__m512i)b);
}
inline Dwords unpack_high_64(Dwords a, Dwords b) {
    return (Dwords)_mm512_unpackhi_epi64((__m512i)a, (__m512i)b);
}
// A byte, or a nibble (the low one first), in every lane; above a nibble anything.
inline Dwords load_bytes(const uint8_t* from) {
    return (Dwords)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline Dwords load_nibbles(const uint8_t* from) {
    int64_t few;
    memcpy(&few, from, sizeof(few));
    const __m512i which = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    const __m512i shift = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    return (Dwords)_mm512_srlv_epi32(_mm512_permutexvar_epi32(which, _mm512_set1_epi64(few)), shift);
}
inline bool any_bit(Dwords v) { return _mm512_test_epi32_mask((__m512i)v, (__m512i)v) != 0; }
// E4M3 as IEEE halves with the same bits, so 2^-8 of the values; not for NaN.
inline Vec fp8_values(const uint8_t* from) {
    const __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    return _mm512_cvtph_ps(
        _mm256_and_si256(_mm256_slli_epi16(words, 7), _mm256_set1_epi16(static_cast<int16_t>(0xbf80))));
}
// The same of byte j of every lane: put(j, values).
template <class Put>
[[gnu::always_inline]] inline void fp8_values(Dwords v, const Put& put) {
    const __m512i in_lanes =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    const __m512i across = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i bytes = _mm512_permutexvar_epi32(across, _mm512_shuffle_epi8((__m512i)v, in_lanes));
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
        const __m256i two = half == 0 ? _mm512_castsi512_si256(bytes) : _mm512_extracti64x4_epi64(bytes, 1);
        const __m512i halves = _mm512_and_si512(_mm512_slli_epi16(_mm512_cvtepi8_epi16(two), 7),
                                                _mm512_set1_epi16(static_cast<int16_t>(0xbf80)));
        put(2 * half, _mm512_cvtph_ps(_mm512_castsi512_si256(halves)));
        put(2 * half + 1, _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1)));
    }
}
// Integers less 8, and E2M1, in bits 0 to 3 of each lane.
inline Vec int4_values(Dwords v) {
    const __m512 values = _mm512_setr_ps(-8.0f, -7.0f, -6.0f, -5.0f, -4.0f, -3.0f, -2.0f, -1.0f, 0.0f, 1.0f,
                                         2.0f, 3.0f, 4.0f, 5.0f, 6.0f, 7.0f);
    return _mm512_permutexvar_ps((__m512i)v, values);
}
inline Vec fp4_values(Dwords v) {
    const __m512 values = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f,
                                         -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
    return _mm512_permutexvar_ps((__m512i)v, values);
}

// 16 bytes each of blocks `step` bytes apart.
inline __m512i blocks_of_16(const uint8_t* p, int64_t step) {
    const auto two = [&](const uint8_t* from) {
        const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
        return _mm256_inserti128_si256(_mm256_castsi128_si256(low),
                                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + step)), 1);
    };
    return _mm512_inserti64x4(_mm512_castsi256_si512(two(p)), two(p + 2 * step), 1);
}
