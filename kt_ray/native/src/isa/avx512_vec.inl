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

#define KT_UNITS

using Dwords = uint32_t __attribute__((vector_size(64)));
// 16 rows of kBytes, 16, 32 or 64: put(d, dwords d of all rows). Every row is read at once: rows a power of
// two apart share a set of the L1 cache, and would be gone when their turn came again.
template <int kBytes, class Put>
[[gnu::always_inline]] inline void transpose_rows(const uint8_t* from, int64_t row_bytes, const Put& put) {
    if constexpr (kBytes == 64) {
        __m512i a[16];
        for (int n = 0; n < 16; ++n) a[n] = _mm512_loadu_si512(from + n * row_bytes);
        transpose_dwords(a, [&](int k, __m512i v) { put(k, (Dwords)v); });
        return;
    }
    // Four rows of each vector (kBytes 32: two, twice as wide) in its 128-bit lanes.
    constexpr int kVectors = kBytes / 4;
    __m512i a[kVectors], b[kVectors];
    for (int n = 0; n < kVectors; ++n) {
        const uint8_t* row = from + n * row_bytes;
        const auto at = [&](int64_t below) {
            return _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + below * row_bytes));
        };
        if constexpr (kBytes == 16) {
            const __m512i first = _mm512_inserti32x4(_mm512_castsi128_si512(at(0)), at(4), 1);
            a[n] = _mm512_inserti32x4(_mm512_inserti32x4(first, at(8), 2), at(12), 3);
        } else {
            const auto* low = reinterpret_cast<const __m256i*>(row);
            const auto* high = reinterpret_cast<const __m256i*>(row + 8 * row_bytes);
            a[n] = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256(low)),
                                      _mm256_loadu_si256(high), 1);
        }
    }
    for (int q = 0; q < kVectors; q += 4) {
        const __m512i low0 = _mm512_unpacklo_epi32(a[q], a[q + 1]),
                      high0 = _mm512_unpackhi_epi32(a[q], a[q + 1]);
        const __m512i low1 = _mm512_unpacklo_epi32(a[q + 2], a[q + 3]);
        const __m512i high1 = _mm512_unpackhi_epi32(a[q + 2], a[q + 3]);
        b[q] = _mm512_unpacklo_epi64(low0, low1);
        b[q + 1] = _mm512_unpackhi_epi64(low0, low1);
        b[q + 2] = _mm512_unpacklo_epi64(high0, high1);
        b[q + 3] = _mm512_unpackhi_epi64(high0, high1);
    }
    if constexpr (kBytes == 16) {
        for (int d = 0; d < 4; ++d) put(d, (Dwords)b[d]);
    } else {
        const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13);
        const __m512i high = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
        for (int d = 0; d < 4; ++d) {
            put(d, (Dwords)_mm512_permutex2var_epi64(b[d], low, b[4 + d]));
            put(4 + d, (Dwords)_mm512_permutex2var_epi64(b[d], high, b[4 + d]));
        }
    }
}
// 16 bytes of rows 0, 4, 8, 12 in the 128-bit lanes.
inline Dwords load_lanes(const uint8_t* from, int64_t row_bytes) {
    const auto row = [&](int64_t n) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + n * row_bytes));
    };
    __m512i v = _mm512_inserti32x4(_mm512_castsi128_si512(row(0)), row(4), 1);
    v = _mm512_inserti32x4(v, row(8), 2);
    return (Dwords)_mm512_inserti32x4(v, row(12), 3);
}
inline Dwords unpack_low_32(Dwords a, Dwords b) { return (Dwords)_mm512_unpacklo_epi32((__m512i)a, (__m512i)b); }
inline Dwords unpack_high_32(Dwords a, Dwords b) { return (Dwords)_mm512_unpackhi_epi32((__m512i)a, (__m512i)b); }
inline Dwords unpack_low_64(Dwords a, Dwords b) { return (Dwords)_mm512_unpacklo_epi64((__m512i)a, (__m512i)b); }
inline Dwords unpack_high_64(Dwords a, Dwords b) { return (Dwords)_mm512_unpackhi_epi64((__m512i)a, (__m512i)b); }
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
inline Vec vmin(Vec a, Vec b) { return _mm512_min_ps(a, b); }
// E2M1 in bits 0 to 3 of each lane.
inline Vec fp4_values(Dwords v) {
    const __m512 values = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f,
                                         -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
    return _mm512_permutexvar_ps((__m512i)v, values);
}
