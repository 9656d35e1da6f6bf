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

// Of isa/avx_rows.inl.
using Words = uint16_t __attribute__((vector_size(64)));
using SignedWords = int16_t __attribute__((vector_size(64)));
inline Words words_at(const uint8_t* p) { return (Words)iload(p); }
inline Words words_of_blocks(const uint8_t* p, int64_t step) { return (Words)blocks_of_16(p, step); }
inline Words larger_bytes(Words a, Words b) { return (Words)_mm512_max_epu8((__m512i)a, (__m512i)b); }
inline bool any_byte(Words v, char byte) {
    return _mm512_cmpeq_epi8_mask((__m512i)v, _mm512_set1_epi8(byte)) != 0;
}
inline Words looked_up(__m128i table, Words nibbles) {
    return (Words)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), (__m512i)nibbles);
}
// Words with 0x41 above the bytes of half h of each 128 bits.
[[gnu::always_inline]] inline Words below_0x41(Words bytes, int h) {
    const __m512i v = (__m512i)bytes, above = _mm512_set1_epi8(0x41);
    return (Words)(h == 0 ? _mm512_unpacklo_epi8(v, above) : _mm512_unpackhi_epi8(v, above));
}
// Half h of a register of IEEE halves.
inline Vec half_values(Words v, int h) {
    return _mm512_cvtph_ps(h == 0 ? _mm512_castsi512_si256((__m512i)v)
                                  : _mm512_extracti64x4_epi64((__m512i)v, 1));
}
inline Vec signed_bytes(const uint8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}
inline float half_value(const uint8_t* p) { return _cvtsh_ss(load_as<uint16_t>(p)); }
inline Vec load_halves(const uint8_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
// Four scales, four lanes each.
inline Vec group_scales(const float* four) {
    return _mm512_permutevar_ps(_mm512_broadcast_f32x4(_mm_loadu_ps(four)),
                                _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3));
}
// Those of sub-blocks 0 and 2 in the halves.
inline Vec sub_block_scales(const float* scales) {
    return _mm512_mask_blend_ps(0xff00, vset1(scales[0]), vset1(scales[2]));
}

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
