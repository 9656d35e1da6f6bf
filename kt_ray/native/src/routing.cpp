#include "routing.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "dropout.h"

namespace kt {
namespace {

int64_t pieces(int64_t n, int64_t size) { return (n + size - 1) / size; }

}  // namespace

template <class Id>
Routing make_routing(const Id* ids, const float* weights, const int64_t* adapter_of_token, int64_t tokens,
                     int64_t slots, int64_t experts, int64_t adapters) {
    if (adapter_of_token != nullptr)
        for (int64_t t = 0; t < tokens; ++t)
            if (adapter_of_token[t] < -1 || adapter_of_token[t] >= adapters)
                throw std::invalid_argument("adapter_of_token: token " + std::to_string(t) +
                                            " names adapter " + std::to_string(adapter_of_token[t]) +
                                            ", there are " + std::to_string(adapters) + " (-1: none)");
    const auto adapter = [&](int64_t token) -> int64_t {
        if (adapters == 0) return -1;
        return adapter_of_token == nullptr ? 0 : adapter_of_token[token];
    };
    // One bin per (expert, adapter + 1).
    const int64_t per_expert = adapters + 1;
    std::vector<int64_t> starts(experts * per_expert + 1, 0);
    for (int64_t s = 0; s < tokens * slots; ++s) {
        const int64_t expert = ids[s];
        if (expert < 0 || expert > experts)
            throw std::invalid_argument("ids: token " + std::to_string(s / slots) + " slot " +
                                        std::to_string(s % slots) + " names expert " +
                                        std::to_string(expert) + ", required 0.." + std::to_string(experts) +
                                        " (the last: no expert)");
        if (expert < experts) ++starts[expert * per_expert + adapter(s / slots) + 1 + 1];
    }
    for (size_t b = 1; b < starts.size(); ++b) starts[b] += starts[b - 1];

    Routing r;
    const int64_t rows = starts.back();
    r.row_token.resize(rows);
    r.row_slot.resize(rows);
    r.row_weight.resize(rows);
    for (int64_t e = 0; e < experts; ++e) {
        for (int64_t a = 0; a < per_expert; ++a) {
            const Group group{static_cast<int32_t>(e), static_cast<int32_t>(a - 1),
                              starts[e * per_expert + a], starts[e * per_expert + a + 1]};
            if (group.begin < group.end) r.groups.push_back(group);
        }
    }
    std::vector<int64_t> next = starts;
    for (int64_t s = 0; s < tokens * slots; ++s) {
        const int64_t expert = ids[s];
        if (expert == experts) continue;
        const int64_t row = next[expert * per_expert + adapter(s / slots) + 1]++;
        r.row_token[row] = static_cast<int32_t>(s / slots);
        r.row_slot[row] = s;
        r.row_weight[row] = weights[s];
    }
    return r;
}

template Routing make_routing(const int32_t*, const float*, const int64_t*, int64_t, int64_t, int64_t,
                              int64_t);
template Routing make_routing(const int64_t*, const float*, const int64_t*, int64_t, int64_t, int64_t,
                              int64_t);

void Routing::cut(int64_t max_rows, int64_t step, int64_t max_span, int64_t max_chunk) {
    blocks.clear();
    segments.clear();
    spans.clear();
    chunks.clear();
    for (size_t first = 0, end = 0; first < groups.size(); first = end) {
        while (end < groups.size() && groups[end].expert == groups[first].expert) ++end;
        cut_expert(first, end, max_rows, step, max_span);
    }
    for (size_t g = 0; g < groups.size(); ++g) {
        int64_t chunk_rows = 0;
        for (int64_t s = groups[g].segment_begin; s < groups[g].segment_end; ++s) {
            if (chunk_rows == 0 || chunk_rows + segments[s].count > max_chunk) {
                chunks.push_back({static_cast<int32_t>(g), s, s});
                chunk_rows = 0;
            }
            chunks.back().segment_end = s + 1;
            chunk_rows += segments[s].count;
        }
    }
}

// The rows of an expert, whose groups are [first, end).
void Routing::cut_expert(size_t first, size_t end, int64_t max_rows, int64_t step, int64_t max_span) {
    const int32_t expert = groups[first].expert;
    const int64_t start = groups[first].begin, rows = groups[end - 1].end - start;
    const int64_t steps = pieces(rows, step), count = pieces(rows, max_rows);
    int64_t span_rows = 0;
    size_t g = first;
    groups[g].segment_begin = static_cast<int64_t>(segments.size());
    for (int64_t b = 0; b < count; ++b) {
        // Even blocks: a ragged last one would waste most of a micro-kernel.
        const int64_t begin = start + std::min(rows, steps * b / count * step);
        const int64_t stop = start + std::min(rows, steps * (b + 1) / count * step);
        const int64_t index = static_cast<int64_t>(blocks.size());
        RowBlock block{begin, static_cast<int32_t>(stop - begin), expert,
                       static_cast<int64_t>(segments.size())};
        for (int64_t row = begin; row < stop;) {
            const int64_t until = std::min(stop, groups[g].end);
            segments.push_back({row, static_cast<int32_t>(until - row), static_cast<int32_t>(g), index});
            groups[g].segment_end = static_cast<int64_t>(segments.size());
            row = until;
            if (row < groups[g].end || g + 1 == end) continue;
            ++g;
            groups[g].segment_begin = static_cast<int64_t>(segments.size());
        }
        block.segment_end = static_cast<int64_t>(segments.size());
        blocks.push_back(block);
        if (b == 0 || span_rows + block.count > max_span) {
            spans.push_back({expert, index, index});
            span_rows = 0;
        }
        spans.back().block_end = index + 1;
        span_rows += block.count;
    }
}

void hash_rows(Routing& routing, const Dropout& dropout, int64_t layer,
               const std::vector<int64_t>& expert_ids, const int64_t* keys) {
    const int64_t rows = routing.rows();
    routing.row_hash.resize(3 * rows);
    for (const Group& range : routing.groups)
        for (int projection = 0; projection < 3; ++projection) {
            const uint32_t stream =
                expert_stream(static_cast<uint32_t>(layer), static_cast<uint32_t>(expert_ids[range.expert]),
                              static_cast<uint32_t>(projection));
            for (int64_t row = range.begin; row < range.end; ++row)
                routing.row_hash[projection * rows + row] = row_hash(
                    dropout.seed, dropout.step, stream, static_cast<uint64_t>(keys[routing.row_token[row]]));
        }
}

}  // namespace kt
