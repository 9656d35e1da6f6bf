// Rounding to bfloat16 by the CPU; it flushes denormals to zero, as the products that read the result do.
#define KT_VECTOR_BF16

inline Vec vround_bf16(Vec v) {
    const __m256i bits = (__m256i)_mm512_cvtneps_pbh(v);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
inline void vstore(Bf16* to, Vec v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(v));
}
