#include "finite.h"

#include <cstring>
#include <stdexcept>
#include <string>

namespace kt {
namespace {

// All exponent bits set: infinity or NaN.
bool finite(const float* values, int64_t count) {
    uint32_t bad = 0;
    for (int64_t i = 0; i < count; ++i) {
        uint32_t bits;
        std::memcpy(&bits, values + i, sizeof(bits));
        bad |= static_cast<uint32_t>((bits & 0x7f800000u) == 0x7f800000u);
    }
    return bad == 0;
}

bool finite(const uint16_t* values, int64_t count) {
    uint16_t bad = 0;
    for (int64_t i = 0; i < count; ++i) bad |= static_cast<uint16_t>((values[i] & 0x7f80u) == 0x7f80u);
    return bad == 0;
}

bool finite(const void* values, int64_t first, int64_t count, bool is_bf16) {
    return is_bf16 ? finite(static_cast<const uint16_t*>(values) + first, count)
                   : finite(static_cast<const float*>(values) + first, count);
}

}  // namespace

void FiniteCheck::input(const char* name, const void* values, bool is_bf16) const {
    for (int64_t t = 0; t < pass.tokens; ++t)
        if (!finite(values, t * pass.hidden_pad, pass.hidden, is_bf16))
            throw std::invalid_argument(std::string(name) + ": token " + std::to_string(t) +
                                        " has values that are not finite, at layer " +
                                        std::to_string(weights.layer));
}

void FiniteCheck::rows(const char* name, const void* packed, int64_t depth) const {
    for (int64_t q = 0; q < pass.num_blocks; ++q) {
        const RowBlock& b = pass.blocks[q];
        if (finite(packed, b.begin * depth, b.count * depth, compute_is_bf16)) continue;
        throw std::invalid_argument("layer " + std::to_string(weights.layer) + ", expert " +
                                    std::to_string(weights.expert_ids[b.expert]) + ": " + name +
                                    " is not finite for some of its tokens " +
                                    std::to_string(pass.row_token[b.begin]) + " to " +
                                    std::to_string(pass.row_token[b.begin + b.count - 1]));
    }
}

void FiniteCheck::output(const char* name, const float* values) const {
    for (int64_t t = 0; t < pass.tokens; ++t) {
        if (finite(values, t * pass.hidden, pass.hidden, false)) continue;
        std::string experts;
        for (int64_t g = 0; g < pass.num_groups; ++g)
            for (int64_t row = pass.groups[g].begin; row < pass.groups[g].end; ++row)
                if (pass.row_token[row] == t)
                    experts += (experts.empty() ? "" : " or ") +
                               std::to_string(weights.expert_ids[pass.groups[g].expert]);
        throw std::invalid_argument("layer " + std::to_string(weights.layer) + ", expert " + experts + ": " +
                                    name + " of token " + std::to_string(t) + " is not finite");
    }
}

void FiniteCheck::gradients(size_t adapter, const LoraGradView& grads, int64_t rank) const {
    const struct {
        const char* name;
        const float* values;
        int64_t width;
    } all[] = {{"gate_a", grads.gate_a, pass.hidden}, {"gate_b", grads.gate_b, pass.inter},
               {"up_a", grads.up_a, pass.hidden},     {"up_b", grads.up_b, pass.inter},
               {"down_a", grads.down_a, pass.inter},  {"down_b", grads.down_b, pass.hidden}};
    for (const auto& m : all) {
        if (m.values == nullptr) continue;
        for (int64_t e = 0; e < pass.experts; ++e)
            if (!finite(m.values + e * rank * m.width, rank * m.width))
                throw std::invalid_argument("layer " + std::to_string(weights.layer) + ", expert " +
                                            std::to_string(weights.expert_ids[e]) + ": the gradient of " +
                                            m.name + " of adapter " + std::to_string(adapter) +
                                            " is not finite");
    }
}

}  // namespace kt
