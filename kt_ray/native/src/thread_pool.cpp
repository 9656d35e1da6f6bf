#include "thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>

namespace kt {
namespace {

using Clock = std::chrono::steady_clock;

// Phases of one call follow each other within microseconds: look that long before sleeping.
constexpr auto kSpin = std::chrono::microseconds(5);

// CPU time of the calling thread: what others on its core take, and what it sleeps, does not count.
int64_t thread_cpu_ns() {
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<int64_t>(now.tv_sec) * 1000000000 + now.tv_nsec;
}

template <class Ready>
bool spin_until(Ready ready) {
    const auto deadline = Clock::now() + kSpin;
    do {
        for (int i = 0; i < 32; ++i) {
            if (ready()) return true;
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
        }
    } while (Clock::now() < deadline);
    return ready();
}

void pin(std::thread& thread, int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    const int error = pthread_setaffinity_np(thread.native_handle(), sizeof(set), &set);
    if (error != 0)
        throw std::runtime_error("cannot pin a thread to CPU " + std::to_string(cpu) + " (errno " +
                                 std::to_string(error) + ")");
}

}  // namespace

ThreadPool::ThreadPool(int threads, const std::vector<int>& cpus) : owner_(getpid()) {
    workers_.reserve(threads);
    try {
        for (int i = 0; i < threads; ++i) {
            workers_.emplace_back([this, i] { worker(i); });
            if (!cpus.empty()) pin(workers_.back(), cpus[i % cpus.size()]);
        }
    } catch (...) {
        {
            std::lock_guard lock(mutex_);
            stopping_ = true;
        }
        start_.notify_all();
        for (std::thread& w : workers_) w.join();
        throw;
    }
}

ThreadPool::~ThreadPool() {
    {
        std::lock_guard lock(mutex_);
        stopping_ = true;
    }
    start_.notify_all();
    for (std::thread& w : workers_) w.join();
}

void ThreadPool::Deleter::operator()(ThreadPool* pool) const {
    if (pool->owned()) delete pool;
}

bool ThreadPool::owned() const { return getpid() == owner_; }

void ThreadPool::run(int64_t count, const Task& task, const std::vector<int64_t>& ends) {
    if (!owned())
        throw std::runtime_error("this engine's threads belong to process " + std::to_string(owner_) +
                                 "; a forked child must build its own engine");
    if (count <= 0) return;
    std::lock_guard exclusive(run_mutex_);
    {
        std::lock_guard lock(mutex_);
        task_ = &task;
        ends_ = &ends;
        count_ = count;
        next_ = 0;
        done_tasks_ = 0;
        failed_ = false;
        error_ = nullptr;
        running_ = threads();
        generation_.fetch_add(1, std::memory_order_release);
    }
    start_.notify_all();
    const auto finished = [this] { return running_.load(std::memory_order_acquire) == 0; };
    if (!spin_until(finished)) {
        std::unique_lock lock(mutex_);
        done_.wait(lock, finished);
    }
    // The last worker may still hold the mutex to notify; error_ was written before running_ fell.
    if (error_) std::rethrow_exception(error_);
}

void ThreadPool::worker(int index) {
    uint64_t seen = 0;
    for (;;) {
        const auto woken = [&] {
            return stopping_.load(std::memory_order_acquire) ||
                   generation_.load(std::memory_order_acquire) != seen;
        };
        if (!spin_until(woken)) {
            std::unique_lock lock(mutex_);
            start_.wait(lock, woken);
        }
        if (stopping_) return;
        seen = generation_.load(std::memory_order_acquire);
        const int64_t begin = thread_cpu_ns();
        work(index);
        busy_ns_ += thread_cpu_ns() - begin;
        if (running_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
            std::lock_guard lock(mutex_);
            done_.notify_one();
        }
    }
}

// False: a task has failed, and the others will not be done.
bool ThreadPool::wait_for_those_before(int64_t task) {
    const auto end = std::upper_bound(ends_->begin(), ends_->end(), task);
    if (end == ends_->begin()) return true;
    const auto over = [&] {
        return done_tasks_.load(std::memory_order_acquire) >= end[-1] ||
               failed_.load(std::memory_order_acquire);
    };
    if (!over()) {
        const int64_t begin = thread_cpu_ns();
        // Where threads share a CPU, the one that works may wait for this one's time.
        while (!spin_until(over)) sched_yield();
        busy_ns_ -= thread_cpu_ns() - begin;
    }
    return !failed_.load(std::memory_order_acquire);
}

void ThreadPool::work(int index) {
    for (;;) {
        const int64_t task = next_.fetch_add(1, std::memory_order_relaxed);
        if (task >= count_ || !wait_for_those_before(task)) return;
        try {
            (*task_)(task, index);
        } catch (...) {
            std::lock_guard lock(mutex_);
            if (!error_) error_ = std::current_exception();
            next_ = count_;
            failed_.store(true, std::memory_order_release);
            return;
        }
        if (!ends_->empty()) done_tasks_.fetch_add(1, std::memory_order_acq_rel);
    }
}

}  // namespace kt
