// The scan for NaN and infinity that a caller may ask for: throws std::invalid_argument naming what, layer
// and expert.
#pragma once

#include "engine.h"

namespace kt {

struct FiniteCheck {
    const Weights& weights;
    const Pass& pass;
    bool compute_is_bf16;

    // [T, H] as stored, padded.
    void input(const char* name, const void* values, bool is_bf16) const;
    // A packed buffer of `depth` elements per row, after its padding was written.
    void rows(const char* name, const void* packed, int64_t depth) const;
    // [T, H] summed over a token's experts: names those, as the sum no longer tells.
    void output(const char* name, const float* values) const;
    void gradients(size_t adapter, const LoraGradView& grads, int64_t rank) const;
};

}  // namespace kt
