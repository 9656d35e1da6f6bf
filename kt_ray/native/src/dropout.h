// The counter-based dropout hash (docs/numerics.md). Internal linkage: also compiled per instruction set.
#pragma once

#include <cstdint>

namespace kt {
namespace {

constexpr uint32_t kGolden = 0x9E3779B9u;

[[maybe_unused]] inline uint32_t fmix(uint32_t h) {
    h ^= h >> 16;
    h *= 0x85EBCA6Bu;
    h ^= h >> 13;
    h *= 0xC2B2AE35u;
    h ^= h >> 16;
    return h;
}

[[maybe_unused]] inline uint32_t combine(uint32_t h, uint32_t v) { return fmix(h * 31u + v + kGolden); }

// The stream of one expert's projection: gate 0, up 1, down 2.
[[maybe_unused]] inline uint32_t expert_stream(uint32_t layer, uint32_t expert, uint32_t projection) {
    return combine(combine(combine(0x45585054u, layer), expert), projection);
}

// Of one token in one stream; key = sample << 32 | position.
[[maybe_unused]] inline uint32_t row_hash(uint64_t seed, uint32_t step, uint32_t stream, uint64_t key) {
    uint32_t h = 0;
    h = combine(h, static_cast<uint32_t>(seed));
    h = combine(h, static_cast<uint32_t>(seed >> 32));
    h = combine(h, step);
    h = combine(h, stream);
    h = combine(h, static_cast<uint32_t>(key >> 32));  // sample, low half
    h = combine(h, 0);                                 // sample, high half: keys hold 32 bits
    h = combine(h, static_cast<uint32_t>(key));        // position
    return h;
}

// Of one element of that row; it is kept iff this is not below floor(p * 2**32).
[[maybe_unused]] inline uint32_t element_hash(uint32_t row, uint32_t j) {
    return fmix(row + (j + 1u) * kGolden);
}

}  // namespace
}  // namespace kt
