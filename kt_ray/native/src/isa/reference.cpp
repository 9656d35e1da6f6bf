// Plain C++: what every CPU runs, and the form the other instruction sets are read against.
#include <cstring>
#include <utility>

#include "dropout.h"
#include "kernels.h"

namespace kt::reference {
namespace {

#include "generic/scalar.inl"

constexpr int64_t kLanes = 8;
constexpr int64_t kMaxRowsF32 = 4;

using Vec = float __attribute__((vector_size(kLanes * 4)));
template <class From>
inline Vec vload(const From* from) {
    Vec r;
    for (int64_t j = 0; j < kLanes; ++j) r[j] = to_float(from[j]);
    return r;
}
inline void vstore(float* to, Vec v) { memcpy(to, &v, sizeof(v)); }
inline Vec vset1(float v) { return Vec{} + v; }
inline Vec vfma(Vec a, Vec b, Vec c) { return c + a * b; }
inline Vec vadd_product(Vec sum, Vec a, Vec b) { return sum + a * b; }

// to[k * step + n] = from[n * ld + k] for a square of kLanes.
inline void transpose_block(const float* from, int64_t ld, float* to, int64_t step) {
    for (int64_t k = 0; k < kLanes; ++k)
        for (int64_t n = 0; n < kLanes; ++n) to[k * step + n] = from[n * ld + k];
}

// kLanes pairs of 16 bits, or int32 sums.
struct IVec {
    int32_t v[kLanes];
};
inline IVec iload(const void* from) {
    IVec r;
    memcpy(r.v, from, sizeof(r.v));
    return r;
}
inline void istore(void* to, IVec a) { memcpy(to, a.v, sizeof(a.v)); }
inline IVec iset1(int32_t v) {
    IVec r;
    for (int64_t j = 0; j < kLanes; ++j) r.v[j] = v;
    return r;
}
inline Vec ifloat(IVec a) {
    Vec r;
    for (int64_t j = 0; j < kLanes; ++j) r[j] = static_cast<float>(a.v[j]);
    return r;
}
inline IVec idot(IVec sum, IVec panel, IVec left) {
    for (int64_t j = 0; j < kLanes; ++j) {
        int16_t a[2], b[2];
        memcpy(a, left.v + j, sizeof(a));
        memcpy(b, panel.v + j, sizeof(b));
        sum.v[j] += a[0] * b[0] + a[1] * b[1];
    }
    return sum;
}

#include "generic/vector.inl"
#include "generic/formats.inl"
#include "generic/micro_f32.inl"
#include "generic/panels.inl"
#include "generic/rows.inl"
#include "generic/ahead.inl"
#include "generic/activation.inl"
#include "generic/int8.inl"
#include "generic/micro_int8.inl"
#include "generic/moe.inl"

}  // namespace

const Kernels f32 = Entry<float, ComputeF32>::kernels;
const Kernels bf16 = Entry<Bf16, ComputeF32>::kernels;
const Kernels int8 = Entry<Bf16, ComputeInt8<ComputeF32, MicroInt8<int16_t, 0>, MicroNibbles<int16_t>,
                                             PlainInt8Ahead<0, int16_t>>>::kernels;

}  // namespace kt::reference
