// AVX-512 with AVX512_VNNI: integer products in vpdpbusd, everything else as in avx512.
#include <immintrin.h>

#include <cstring>
#include <utility>

#include "dropout.h"
#include "kernels.h"

namespace kt::avx512_vnni {
namespace {

#include "generic/scalar.inl"
#include "isa/avx512_vec.inl"
#include "isa/avx512_int8_vec.inl"

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
    Entry<Bf16,
          ComputeInt8<ComputeF32, MicroInt8<int8_t, 128>, MicroNibbles<int8_t>, Int8Ahead512<0x80>>>::kernels;

}  // namespace kt::avx512_vnni
