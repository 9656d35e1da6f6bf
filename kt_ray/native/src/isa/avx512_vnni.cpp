// AVX-512 with AVX512_VNNI: INT8 products in vpdpbusd, everything else as in avx512.
#include <immintrin.h>

#include <cstring>
#include <utility>

#include "dropout.h"
#include "kernels.h"

namespace kt::avx512_vnni {
namespace {

#include "generic/scalar.inl"
#include "isa/avx512_vec.inl"

using IVec = __m512i;
inline IVec iload(const void* p) { return _mm512_loadu_si512(p); }
inline void istore(void* p, IVec v) { _mm512_storeu_si512(p, v); }
inline IVec iset1(int32_t v) { return _mm512_set1_epi32(v); }
// Unsigned times signed: the panel's bytes are raised by 128.
inline IVec idot(IVec sum, IVec panel, IVec left) { return _mm512_dpbusd_epi32(sum, panel, left); }

#include "generic/vector.inl"
#include "generic/formats.inl"
#include "generic/micro_f32.inl"
#include "generic/panels.inl"
#include "generic/rows.inl"
#include "generic/ahead.inl"
#include "generic/activation.inl"
#include "generic/int8.inl"
#include "generic/micro_int8.inl"
#include "isa/avx512_int8.inl"
#include "generic/moe.inl"

}  // namespace

const Kernels int8 =
    Entry<Bf16, ComputeInt8<ComputeF32, MicroInt8<int8_t, 128>, Int8Ahead512<0x80>>>::kernels;

}  // namespace kt::avx512_vnni
