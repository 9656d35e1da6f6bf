// What an engine's threads do beside experts: copies, additions and sums over whole tensors.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>

#include "engine.h"

namespace kt {
namespace {

constexpr int64_t kCopiedBytes = 1 << 19;  // by a thread at a time
constexpr int64_t kTaskFloats = kCopiedBytes / static_cast<int64_t>(sizeof(float));
constexpr int64_t kSquaredRow = 4096;  // divides what a task takes

int64_t pieces(int64_t n, int64_t size) { return (n + size - 1) / size; }

}  // namespace

void Engine::spread(const std::vector<int64_t>& counts, int64_t step,
                    const std::function<void(size_t, int64_t, int64_t)>& task) {
    check_process();
    std::lock_guard lock(call_mutex_);
    if (!pool_) throw std::runtime_error("the engine is closed");
    std::vector<int64_t> ends;  // of each one's runs among all
    for (const int64_t count : counts) ends.push_back((ends.empty() ? 0 : ends.back()) + pieces(count, step));
    if (ends.empty()) return;
    pool_->run(ends.back(), [&](int64_t run, int) {
        const size_t which = std::upper_bound(ends.begin(), ends.end(), run) - ends.begin();
        const int64_t first = (run - (which == 0 ? 0 : ends[which - 1])) * step;
        task(which, first, std::min(counts[which], first + step));
    });
}

void Engine::join(const std::vector<Piece>& parts, void* to) {
    std::vector<int64_t> sizes;
    std::vector<char*> targets;
    char* next = static_cast<char*>(to);
    for (const Piece& part : parts) {
        sizes.push_back(part.bytes);
        targets.push_back(next);
        next += part.bytes;
    }
    spread(sizes, kCopiedBytes, [&](size_t part, int64_t first, int64_t last) {
        std::memcpy(targets[part] + first, static_cast<const char*>(parts[part].from) + first,
                    static_cast<size_t>(last - first));
    });
}

void Engine::add_rows(const std::vector<AddedRows>& parts, int64_t rows, int64_t row, float* out) {
    const int64_t row_bytes = std::max<int64_t>(1, row * static_cast<int64_t>(sizeof(float)));
    // All parts of a stretch of rows before the next one: `out` is read and written once.
    spread({rows}, std::max<int64_t>(1, kCopiedBytes / row_bytes), [&](size_t, int64_t first, int64_t last) {
        for (const AddedRows& part : parts) {
            const std::pair<int64_t, int64_t> begin{first, 0};
            auto at = std::lower_bound(part.rows.begin(), part.rows.end(), begin);
            for (; at != part.rows.end() && at->first < last; ++at) {
                const float* __restrict from = part.values + at->second * row;
                float* __restrict to = out + at->first * row;
                for (int64_t i = 0; i < row; ++i) to[i] += from[i];
            }
        }
    });
}

std::vector<double> Engine::squares(const std::vector<Piece>& parts) {
    constexpr int kLanes = 8;  // four registers of SSE2
    const auto square = [](double value) { return value * value; };
    std::vector<int64_t> counts;
    std::vector<size_t> starts;  // of each part's sums
    size_t sums = 0;
    for (const Piece& part : parts) {
        counts.push_back(part.bytes / static_cast<int64_t>(sizeof(float)));
        starts.push_back(sums);
        sums += static_cast<size_t>(pieces(counts.back(), kSquaredRow));
    }
    std::vector<double> all(sums);
    spread(counts, kTaskFloats, [&](size_t part, int64_t first, int64_t last) {
        const float* values = static_cast<const float*>(parts[part].from);
        for (int64_t row = first; row < last; row += kSquaredRow) {
            const int64_t end = std::min(last, row + kSquaredRow);
            double lanes[kLanes] = {};
            int64_t i = row;
            for (; i + kLanes <= end; i += kLanes)
                for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += square(values[i + lane]);
            for (; i < end; ++i) lanes[0] += square(values[i]);
            all[starts[part] + static_cast<size_t>(row / kSquaredRow)] =
                std::accumulate(lanes, lanes + kLanes, 0.0);
        }
    });
    return all;
}

void Engine::round(const float* from, int64_t count, uint16_t* to) {
    spread({count}, kTaskFloats, [&](size_t, int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
            uint32_t bits;
            std::memcpy(&bits, from + i, sizeof bits);
            const uint32_t nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
            to[i] = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : nearest);
        }
    });
}

}  // namespace kt
