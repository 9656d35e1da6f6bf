// Which rows each expert computes: a stable counting sort of the router's choices.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"

namespace kt {

struct Dropout {
    double p = 0;
    uint64_t seed = 0;
    uint32_t step = 0;
};

struct Routing {
    std::vector<Group> groups;  // with rows only, by expert, then adapter
    std::vector<RowBlock> blocks;
    std::vector<Segment> segments;
    std::vector<Span> spans;  // ascending
    std::vector<Chunk> chunks;
    std::vector<int32_t> row_token;
    std::vector<int64_t> row_slot;  // t * K + k
    std::vector<float> row_weight;
    std::vector<uint32_t> row_hash;  // [3, R], empty without dropout

    int64_t rows() const { return static_cast<int64_t>(row_token.size()); }
    // Fills blocks, segments, spans and chunks for micro-kernels that take `max_rows` rows, best in `step`s,
    // and at most `max_span` rows in a span, `max_chunk` in a chunk.
    void cut(int64_t max_rows, int64_t step, int64_t max_span, int64_t max_chunk);

  private:
    void cut_expert(size_t first, size_t end, int64_t max_rows, int64_t step, int64_t max_span);
};

// ids [T, K] in [0, experts]; `experts` itself names no expert. adapter_of_token [T] in [-1, adapters),
// null: all 0 when there are adapters. Throws std::invalid_argument naming the argument.
template <class Id>
Routing make_routing(const Id* ids, const float* weights, const int64_t* adapter_of_token, int64_t tokens,
                     int64_t slots, int64_t experts, int64_t adapters);

// Fills row_hash. keys [T]; expert_ids: the global number of each local expert.
void hash_rows(Routing& routing, const Dropout& dropout, int64_t layer,
               const std::vector<int64_t>& expert_ids, const int64_t* keys);

}  // namespace kt
