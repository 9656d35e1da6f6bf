// AVX-512 (F, BW, DQ, VL): float32 compute, bfloat16 storage widened.
#include <immintrin.h>

#include <cstring>

#include "dropout.h"
#include "kernels.h"

namespace kt::avx512 {
namespace {

#include "generic/scalar.inl"
#include "generic/prefetch.inl"
#include "isa/dispatch_rows.inl"
#include "isa/avx512_common.inl"

#include "generic/panels.inl"
#include "generic/moe.inl"

}  // namespace

const Kernels f32 = Entry<float, MicroF32>::kernels;
const Kernels bf16 = Entry<Bf16, MicroF32>::kernels;

}  // namespace kt::avx512
