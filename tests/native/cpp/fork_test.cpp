// A process is forked while another thread holds the mutex of an engine's buffers: what the child inherits
// can be given back, asked and destroyed. Prints "child ok"; a child that hangs is ended by its alarm.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#define private public  // the mutex
#include "buffers.h"
#undef private

int main() {
    auto cache = std::make_unique<kt::BufferCache>();
    kt::Buffer mine = cache->take(1000);
    cache->give(cache->take(2000));
    std::atomic<bool> held{false}, forked{false};
    std::thread other([&] {
        std::lock_guard lock(cache->mutex_);
        held = true;
        while (!forked) std::this_thread::yield();
    });
    while (!held) std::this_thread::yield();
    const pid_t child = fork();
    if (child == 0) {
        alarm(20);
        cache->give(std::move(mine));
        kt::Buffer fresh = cache->take(1000);
        if (fresh.data() == nullptr || cache->kept_bytes() != 0) _exit(1);
        cache->give(std::move(fresh));
        cache->close();
        cache.reset();
        _exit(0);
    }
    forked = true;
    other.join();
    int status = 0;
    waitpid(child, &status, 0);
    if (status != 0) {
        std::printf("the child ended with status %d\n", status);
        return 1;
    }
    if (cache->kept_bytes() == 0) return 1;
    std::printf("child ok\n");
}
