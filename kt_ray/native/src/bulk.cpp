// What an engine's threads do beside experts: copies, additions and sums over whole tensors.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>

#include "engine.h"

namespace kt {
namespace {

constexpr int64_t kCopiedBytes = 1 << 19;  // by a thread at a time
constexpr int64_t kSquaredRow = 4096;      // divides what a task takes

int64_t pieces(int64_t n, int64_t size) { return (n + size - 1) / size; }

}  // namespace

void Engine::spread(int64_t count, int64_t step, const std::function<void(int64_t, int64_t)>& task) {
    check_process();
    std::lock_guard lock(call_mutex_);
    if (!pool_) throw std::runtime_error("the engine is closed");
    pool_->run(pieces(count, step),
               [&](int64_t run, int) { task(run * step, std::min(count, (run + 1) * step)); });
}

void Engine::join(const std::vector<Piece>& parts, void* to) {
    int64_t start = 0;
    for (const Piece& part : parts) {
        char* target = static_cast<char*>(to) + start;
        const char* source = static_cast<const char*>(part.from);
        spread(part.bytes, kCopiedBytes, [&](int64_t first, int64_t last) {
            std::memcpy(target + first, source + first, static_cast<size_t>(last - first));
        });
        start += part.bytes;
    }
}

void Engine::add_rows(const std::vector<AddedRows>& parts, int64_t rows, int64_t row, float* out) {
    const int64_t row_bytes = std::max<int64_t>(1, row * static_cast<int64_t>(sizeof(float)));
    // All parts of a stretch of rows before the next one: `out` is read and written once.
    spread(rows, std::max<int64_t>(1, kCopiedBytes / row_bytes), [&](int64_t first, int64_t last) {
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
    std::vector<double> all;
    for (const Piece& part : parts) {
        const float* values = static_cast<const float*>(part.from);
        const int64_t count = part.bytes / static_cast<int64_t>(sizeof(float));
        const size_t before = all.size();
        all.resize(before + pieces(count, kSquaredRow));
        double* sums = all.data() + before;
        spread(count, kCopiedBytes / static_cast<int64_t>(sizeof(float)), [&](int64_t first, int64_t last) {
            for (int64_t row = first; row < last; row += kSquaredRow) {
                const int64_t end = std::min(last, row + kSquaredRow);
                double lanes[kLanes] = {};
                int64_t i = row;
                for (; i + kLanes <= end; i += kLanes)
                    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += square(values[i + lane]);
                for (; i < end; ++i) lanes[0] += square(values[i]);
                sums[row / kSquaredRow] = std::accumulate(lanes, lanes + kLanes, 0.0);
            }
        });
    }
    return all;
}

void Engine::round(const float* from, int64_t count, uint16_t* to) {
    spread(count, kCopiedBytes / static_cast<int64_t>(sizeof(float)), [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
            uint32_t bits;
            std::memcpy(&bits, from + i, sizeof bits);
            const uint32_t nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
            to[i] = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : nearest);
        }
    });
}

}  // namespace kt
