// Memory of an engine: aligned, first touched by the threads that use it, reused between calls.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace kt {

// Uninitialised memory, 64-byte aligned; large ones are 2 MiB aligned and ask for huge pages.
class Buffer {
  public:
    Buffer() = default;
    explicit Buffer(size_t bytes);  // throws std::bad_alloc
    Buffer(Buffer&& other) noexcept { swap(other); }
    Buffer& operator=(Buffer&& other) noexcept {
        swap(other);
        return *this;
    }
    ~Buffer();

    template <class T>
    T* as() const {
        return static_cast<T*>(data_);
    }
    void* data() const { return data_; }
    size_t bytes() const { return bytes_; }

  private:
    void swap(Buffer& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(bytes_, other.bytes_);
    }
    void* data_ = nullptr;
    size_t bytes_ = 0;
};

// Buffers given back are kept for the next request: the activations of one step have the sizes of
// the last, and fresh pages cost more than the copy into them. A buffer in reuse is at most a quarter
// larger than asked for, before rounding. A request that finds no fit frees one kept buffer first, so the
// cache follows shapes that drift instead of growing.
//
// In a process forked later nothing is kept: a thread of the parent may have held the mutex, or been changing
// the list, and is not there to go on.
class BufferCache {
  public:
    BufferCache() = default;
    ~BufferCache();
    BufferCache(const BufferCache&) = delete;
    BufferCache& operator=(const BufferCache&) = delete;
    Buffer take(size_t bytes);
    void give(Buffer buffer);
    // Frees what is kept, and from now on what is given back.
    void close();
    size_t kept_bytes() const;

  private:
    bool forked() const { return getpid() != process_; }

    const pid_t process_ = getpid();
    mutable std::mutex mutex_;
    std::vector<Buffer> free_;
    bool closed_ = false;
};

}  // namespace kt
