// AVX-512 with AVX512_BF16: bfloat16 pairs multiply in vdpbf16ps. Float32 weights are avx512's.
#include <immintrin.h>

#include <cstring>
#include <utility>

#include "cpu_features.h"
#include "dropout.h"
#include "kernels.h"

namespace kt::avx512_bf16 {
namespace {

#include "generic/scalar.inl"
#include "isa/avx512_vec.inl"
#include "isa/avx512_bf16_vec.inl"

#include "generic/vector.inl"
#include "generic/formats.inl"
#include "generic/micro_f32.inl"
#include "generic/panels.inl"
#include "generic/rows.inl"
#include "generic/ahead.inl"
#include "generic/activation.inl"
#include "isa/avx512_strips.inl"
#include "isa/avx512_bf16_rows.inl"
#include "isa/avx512_ahead.inl"
#include "isa/avx512_bf16_micro.inl"
#include "generic/int8.inl"
#include "generic/moe.inl"

}  // namespace

const Kernels bf16 = Entry<Bf16, ComputeBf16<MicroBf16>>::kernels;

}  // namespace kt::avx512_bf16
