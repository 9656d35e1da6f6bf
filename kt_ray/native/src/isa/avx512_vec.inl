// Shared by the AVX-512 instruction sets.

constexpr int64_t kLanes = 16;
constexpr int64_t kMaxRowsF32 = 14;

using Vec = __m512;
inline Vec vload(const float* p) { return _mm512_loadu_ps(p); }
inline Vec vload(const Bf16* p) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
inline void vstore(float* p, Vec v) { _mm512_storeu_ps(p, v); }
inline Vec vset1(float v) { return _mm512_set1_ps(v); }
inline Vec vfma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }

// Stores the transpose of 16 vectors of 16 dwords: row k of the result at to + k * step (in bytes).
inline void store_transposed(__m512i a[16], char* to, int64_t step) {
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
        _mm512_storeu_si512(to + k * step, _mm512_shuffle_i32x4(even01, even23, 0x88));
        _mm512_storeu_si512(to + (4 + k) * step, _mm512_shuffle_i32x4(odd01, odd23, 0x88));
        _mm512_storeu_si512(to + (8 + k) * step, _mm512_shuffle_i32x4(even01, even23, 0xdd));
        _mm512_storeu_si512(to + (12 + k) * step, _mm512_shuffle_i32x4(odd01, odd23, 0xdd));
    }
}

// to[k * step + n] = from[n * ld + k] for a square of kLanes.
inline void transpose_block(const float* from, int64_t ld, float* to, int64_t step) {
    __m512i a[16];
    for (int n = 0; n < 16; ++n) a[n] = _mm512_loadu_si512(from + n * ld);
    store_transposed(a, reinterpret_cast<char*>(to), step * static_cast<int64_t>(sizeof(float)));
}
