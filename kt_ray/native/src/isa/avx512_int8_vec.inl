// int32 sums of products of bytes. Needs AVX512_VNNI.

using IVec = __m512i;
inline IVec iload(const void* p) { return _mm512_loadu_si512(p); }
inline void istore(void* p, IVec v) { _mm512_storeu_si512(p, v); }
inline IVec iset1(int32_t v) { return _mm512_set1_epi32(v); }
inline Vec ifloat(IVec v) { return _mm512_cvtepi32_ps(v); }
// Unsigned times signed: the panel's bytes are raised by 128, or nibbles.
inline IVec idot(IVec sum, IVec panel, IVec left) { return _mm512_dpbusd_epi32(sum, panel, left); }
