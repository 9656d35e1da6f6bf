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

#include "generic/vector.inl"
#include "generic/formats.inl"
#include "generic/micro_f32.inl"
#include "generic/panels.inl"
#include "generic/ahead.inl"
#include "generic/activation.inl"
#include "generic/moe.inl"

}  // namespace

const Kernels f32 = Entry<float, ComputeF32>::kernels;
const Kernels bf16 = Entry<Bf16, ComputeF32>::kernels;

}  // namespace kt::avx512
