// AMX: bfloat16 and int8 in tile products, decoded with AVX-512; nibbles in vpdpbusd, as a tile would hold
// two groups of them. Float32 weights are avx512's, calls by rows avx512_bf16's.
#include <immintrin.h>

#include <cstring>
#include <utility>

#include "cpu_features.h"
#include "dropout.h"
#include "kernels.h"

namespace kt::amx {
namespace {

#include "generic/scalar.inl"
#include "isa/avx512_vec.inl"
#include "isa/avx512_bf16_vec.inl"
#include "isa/avx512_int8_vec.inl"

#include "generic/vector.inl"
#include "generic/formats.inl"
#include "generic/micro_f32.inl"
#include "generic/panels.inl"
#include "generic/rows.inl"
#include "generic/ahead.inl"
#include "generic/activation.inl"
#include "isa/avx512_strips.inl"
#include "isa/avx512_ahead.inl"
#include "isa/amx_micro.inl"
#include "generic/int8.inl"
#include "generic/micro_int8.inl"
#include "isa/avx512_int8.inl"
#include "generic/moe.inl"

}  // namespace

const Kernels bf16 = Entry<Bf16, ComputeBf16<MicroAmx>>::kernels;
const Kernels int8 =
    Entry<Bf16,
          ComputeInt8<ComputeBf16<MicroAmx>, MicroAmxInt8, MicroNibbles<int8_t>, Int8Ahead512<0>>>::kernels;

}  // namespace kt::amx
