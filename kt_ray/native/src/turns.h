// Who may add to a slab next: tasks that add to the same slab of columns do so in order, whichever threads
// they run on. A task waits for the one before it, which a pool that hands tasks out in order has given to
// some thread already.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>

namespace kt {

class Turns {
  public:
    // Nothing is done yet at any of `slabs` slabs. No task runs meanwhile.
    void begin(int64_t slabs) {
        if (slabs > capacity_) {
            done_ = std::make_unique<std::atomic<int32_t>[]>(slabs);
            capacity_ = slabs;
        }
        slabs_ = slabs;
        for (int64_t slab = 0; slab < slabs; ++slab) done_[slab].store(0, std::memory_order_relaxed);
    }
    // Returns when the first `run` runs have added to the slab; false if one of the tasks failed.
    bool wait(int64_t slab, int64_t run) const {
        for (;;) {
            const int32_t done = done_[slab].load(std::memory_order_acquire);
            if (done >= run) return done != kFailed;
            done_[slab].wait(done, std::memory_order_acquire);
        }
    }
    // Run number `run` has added to the slab.
    void done(int64_t slab, int64_t run) {
        int32_t before = static_cast<int32_t>(run);
        // Not if a task failed meanwhile: that stays.
        done_[slab].compare_exchange_strong(before, before + 1, std::memory_order_release,
                                            std::memory_order_relaxed);
        done_[slab].notify_all();
    }
    // A task will not be done: nobody waits for it, or for any other.
    void fail() {
        for (int64_t slab = 0; slab < slabs_; ++slab) {
            done_[slab].store(kFailed, std::memory_order_relaxed);
            done_[slab].notify_all();
        }
    }

  private:
    static constexpr int32_t kFailed = std::numeric_limits<int32_t>::max();
    std::unique_ptr<std::atomic<int32_t>[]> done_;  // runs
    int64_t slabs_ = 0, capacity_ = 0;
};

}  // namespace kt
