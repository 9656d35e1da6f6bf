#include "buffers.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <new>

namespace kt {
namespace {

constexpr size_t kLine = 64;
constexpr size_t kHugePage = size_t{2} << 20;

size_t alignment_of(size_t bytes) { return bytes >= kHugePage ? kHugePage : kLine; }
size_t rounded(size_t bytes) {
    const size_t alignment = alignment_of(bytes);
    return (bytes + alignment - 1) / alignment * alignment;
}

}  // namespace

Buffer::Buffer(size_t bytes) {
    if (bytes == 0) return;
    bytes_ = rounded(bytes);
    data_ = std::aligned_alloc(alignment_of(bytes), bytes_);
    if (data_ == nullptr) throw std::bad_alloc();
    if (bytes >= kHugePage) madvise(data_, bytes_, MADV_HUGEPAGE);  // a wish: failure changes nothing
}

Buffer::~Buffer() { std::free(data_); }

BufferCache::~BufferCache() {
    if (forked()) new std::vector<Buffer>(std::move(free_));  // left alone
}

Buffer BufferCache::take(size_t bytes) {
    if (bytes == 0) return Buffer();
    if (forked()) return Buffer(bytes);
    const size_t most = rounded(bytes + bytes / 4);
    Buffer evicted;  // freed outside the lock
    {
        std::lock_guard lock(mutex_);
        auto best = free_.end();
        for (auto it = free_.begin(); it != free_.end(); ++it)
            if (it->bytes() >= bytes && it->bytes() <= most &&
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
    if (buffer.bytes() == 0 || forked()) return;  // freed with the argument
    std::lock_guard lock(mutex_);
    if (!closed_) free_.push_back(std::move(buffer));
}

void BufferCache::close() {
    if (forked()) return;
    std::lock_guard lock(mutex_);
    closed_ = true;
    free_.clear();
}

size_t BufferCache::kept_bytes() const {
    if (forked()) return 0;
    std::lock_guard lock(mutex_);
    size_t sum = 0;
    for (const Buffer& b : free_) sum += b.bytes();
    return sum;
}

}  // namespace kt
