// AVX-512 (F, BW, DQ, VL): float32 compute, other storage widened.
#include <immintrin.h>

#include <cstring>
#include <utility>

#include "dropout.h"
#include "kernels.h"

namespace kt::avx512 {
namespace {

#include "generic/scalar.inl"
#include "isa/avx512_vec.inl"

// Pairs of 16 bits, or int32 sums.
using IVec = __m512i;
inline IVec iload(const void* p) { return _mm512_loadu_si512(p); }
inline void istore(void* p, IVec v) { _mm512_storeu_si512(p, v); }
inline IVec iset1(int32_t v) { return _mm512_set1_epi32(v); }
inline Vec ifloat(IVec v) { return _mm512_cvtepi32_ps(v); }
inline IVec idot(IVec sum, IVec panel, IVec left) {
    return _mm512_add_epi32(sum, _mm512_madd_epi16(panel, left));
}

#include "generic/vector.inl"
#include "generic/formats.inl"
#include "generic/micro_f32.inl"
#include "generic/panels.inl"
#include "generic/rows.inl"

// Sixteen signed bytes, and halves.
inline Vec widened(__m128i bytes) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)); }
inline Vec halves(__m256i v, int64_t) { return _mm512_cvtph_ps(v); }
inline float half_value(const uint8_t* p) { return _cvtsh_ss(load_as<uint16_t>(p)); }

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

}  // namespace kt::avx512
