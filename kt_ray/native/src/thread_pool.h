// A pool of threads that belongs to one engine: pinned, reused, and destroyed with it.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace kt {

class ThreadPool {
  public:
    using Task = std::function<void(int64_t task, int thread)>;

    // A forked child inherits the object but not the threads: joining them, or destroying the condition
    // variables they wait on, would hang. There the object is left alone.
    struct Deleter {
        void operator()(ThreadPool* pool) const;
    };
    using Owner = std::unique_ptr<ThreadPool, Deleter>;

    // Threads are spread round-robin over `cpus`; an empty list leaves them unpinned.
    ThreadPool(int threads, const std::vector<int>& cpus);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    // Runs task(0..count-1), each once, taken in order by whichever thread is free; returns when all
    // are done. The first exception stops the taking of further tasks and is rethrown here. Callers
    // exclude one another. Throws std::runtime_error in a process forked after construction.
    //
    // `ends`: ascending; tasks from ends[i] on begin when all those before it are done. Threads look for
    // that and do not sleep: phases of one call that would end before a sleeping thread is awake.
    void run(int64_t count, const Task& task, const std::vector<int64_t>& ends = {});

    int threads() const { return static_cast<int>(workers_.size()); }
    // Sum over threads of the CPU time spent inside tasks (not: of the time that calls were outstanding).
    double busy_seconds() const { return static_cast<double>(busy_ns_.load()) * 1e-9; }
    // True in the process that built the pool.
    bool owned() const;

  private:
    void worker(int index);
    void work(int index);
    bool wait_for_those_before(int64_t task);

    const pid_t owner_;
    std::vector<std::thread> workers_;
    std::mutex run_mutex_;  // one run() at a time

    std::mutex mutex_;
    std::condition_variable start_, done_;
    std::atomic<uint64_t> generation_{0};
    std::atomic<bool> stopping_{false};
    const Task* task_ = nullptr;
    const std::vector<int64_t>* ends_ = nullptr;
    int64_t count_ = 0;
    std::atomic<int64_t> next_{0};
    std::atomic<int64_t> done_tasks_{0};  // counted where there are ends
    std::atomic<bool> failed_{false};
    std::atomic<int> running_{0};
    std::exception_ptr error_;
    std::atomic<int64_t> busy_ns_{0};
};

}  // namespace kt
