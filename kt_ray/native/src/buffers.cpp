#include "buffers.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <new>

namespace kt {
namespace {

constexpr size_t kLine = 64;
constexpr size_t kHugePage = size_t{2} << 20;

}  // namespace

Buffer::Buffer(size_t bytes) {
    if (bytes == 0) return;
    const size_t alignment = bytes >= kHugePage ? kHugePage : kLine;
    const size_t rounded = (bytes + alignment - 1) / alignment * alignment;
    data_ = std::aligned_alloc(alignment, rounded);
    if (data_ == nullptr) throw std::bad_alloc();
    bytes_ = rounded;
    if (alignment == kHugePage) madvise(data_, rounded, MADV_HUGEPAGE);  // a wish: failure changes nothing
}

Buffer::~Buffer() { std::free(data_); }

Buffer BufferCache::take(size_t bytes) {
    Buffer evicted;  // freed outside the lock
    {
        std::lock_guard lock(mutex_);
        auto best = free_.end();
        for (auto it = free_.begin(); it != free_.end(); ++it)
            if (it->bytes() >= bytes && it->bytes() / 2 <= bytes + kHugePage &&
                (best == free_.end() || it->bytes() < best->bytes()))
                best = it;
        if (best != free_.end()) {
            Buffer found = std::move(*best);
            free_.erase(best);
            return found;
        }
        if (!free_.empty()) {
            evicted = std::move(free_.front());
            free_.erase(free_.begin());
        }
    }
    evicted = Buffer();
    return Buffer(bytes);
}

void BufferCache::give(Buffer buffer) {
    if (buffer.bytes() == 0) return;
    std::lock_guard lock(mutex_);
    free_.push_back(std::move(buffer));
}

void BufferCache::clear() {
    std::lock_guard lock(mutex_);
    free_.clear();
}

size_t BufferCache::kept_bytes() const {
    std::lock_guard lock(mutex_);
    size_t sum = 0;
    for (const Buffer& b : free_) sum += b.bytes();
    return sum;
}

}  // namespace kt
