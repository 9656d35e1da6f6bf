// Plain C++: what every CPU runs, and the form the other instruction sets are read against.
#include <cstring>

#include "dropout.h"
#include "kernels.h"

namespace kt::reference {
namespace {

#include "generic/scalar.inl"
#include "generic/prefetch.inl"

constexpr int64_t kLanes = 8;
constexpr int kMaxRows = 4;

// A square block of a matrix, transposed into a panel: panel[k * step + n] = w[n][k].
template <class S>
void block_from_rows(const S* w, int64_t ld, float* panel, int64_t step) {
    for (int64_t k = 0; k < kLanes; ++k)
        for (int64_t n = 0; n < kLanes; ++n) panel[k * step + n] = to_float(w[n * ld + k]);
}

struct MicroF32 {
    using T = float;
    static constexpr int64_t kPack = 1;

    // tile [count][2 * kLanes] (+)= rows [count][steps] times panel [steps][2 * kLanes].
    static void run(int count, const float* const* rows, int64_t steps, const float* panel, float* tile,
                    bool accumulate, Prefetch::Stream) {
        for (int i = 0; i < count; ++i) {
            float sum[2 * kLanes] = {};
            if (accumulate) memcpy(sum, tile + i * 2 * kLanes, sizeof(sum));
            for (int64_t k = 0; k < steps; ++k)
                for (int64_t n = 0; n < 2 * kLanes; ++n) sum[n] += rows[i][k] * panel[k * 2 * kLanes + n];
            memcpy(tile + i * 2 * kLanes, sum, sizeof(sum));
        }
    }
};

#include "generic/panels.inl"
#include "generic/moe.inl"

}  // namespace

const Kernels f32 = Entry<float, MicroF32>::kernels;
const Kernels bf16 = Entry<Bf16, MicroF32>::kernels;

}  // namespace kt::reference
