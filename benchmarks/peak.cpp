// What this machine can do at best: products per second from registers, bytes per second from memory.
//
//     peak SECONDS MEGABYTES THREADS...
//
// Prints {"1": {"avx2_f32": GFLOP/s, ..., "read": GB/s}, "2": ...}: an entry for each number of threads, a
// loop for each instruction set that this CPU has. Threads are bound to the CPUs of the affinity mask in
// order, start together, and run; the rates of all are added. The best of five runs of SECONDS / 5 counts,
// since other programs only make it slower. MEGABYTES should be several times the last-level cache.

#include <immintrin.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include <cpuid.h>

namespace {

volatile float sink;

double now() {
    using namespace std::chrono;
    return duration<double>(steady_clock::now().time_since_epoch()).count();
}

// Independent accumulators: more than latency x ports of any core so far, few enough for 16 or 32 registers.
// The empty asm statements hide from the compiler that they all hold the same.
constexpr int kNarrow = 12, kWide = 24, kSteps = 4096;

// a = a / 2 + 1 keeps every value normal.
__attribute__((target("avx2,fma"))) double avx2_f32(size_t, size_t) {
    __m256 a[kNarrow], half = _mm256_set1_ps(0.5f), one = _mm256_set1_ps(1.0f);
    asm volatile("" : "+x"(half), "+x"(one));
#pragma GCC unroll 12
    for (int i = 0; i < kNarrow; ++i) {
        a[i] = one;
        asm volatile("" : "+x"(a[i]));
    }
    for (int step = 0; step < kSteps; ++step) {
#pragma GCC unroll 12
        for (int i = 0; i < kNarrow; ++i) a[i] = _mm256_fmadd_ps(a[i], half, one);
    }
    float sum = 0;
#pragma GCC unroll 12
    for (int i = 0; i < kNarrow; ++i) sum += _mm256_cvtss_f32(a[i]);
    sink = sum;
    return 2.0 * 8 * kNarrow * kSteps;
}

__attribute__((target("avx512f"))) double avx512_f32(size_t, size_t) {
    __m512 a[kWide], half = _mm512_set1_ps(0.5f), one = _mm512_set1_ps(1.0f);
    asm volatile("" : "+v"(half), "+v"(one));
#pragma GCC unroll 24
    for (int i = 0; i < kWide; ++i) {
        a[i] = one;
        asm volatile("" : "+v"(a[i]));
    }
    for (int step = 0; step < kSteps; ++step) {
#pragma GCC unroll 24
        for (int i = 0; i < kWide; ++i) a[i] = _mm512_fmadd_ps(a[i], half, one);
    }
    float sum = 0;
#pragma GCC unroll 24
    for (int i = 0; i < kWide; ++i) sum += _mm512_cvtss_f32(a[i]);
    sink = sum;
    return 2.0 * 16 * kWide * kSteps;
}

// Pairs (1, 1) times (1, -1): the sums stay where they are.
constexpr uint32_t kOnes = 0x3f803f80u, kSigns = 0xbf803f80u;

__attribute__((target("avx512f,avx512bf16"))) double avx512_bf16(size_t, size_t) {
    __m512i ones = _mm512_set1_epi32(static_cast<int>(kOnes)),
            signs = _mm512_set1_epi32(static_cast<int>(kSigns));
    asm volatile("" : "+v"(ones), "+v"(signs));
    __m512 a[kWide];
#pragma GCC unroll 24
    for (int i = 0; i < kWide; ++i) {
        a[i] = _mm512_set1_ps(1.0f);
        asm volatile("" : "+v"(a[i]));
    }
    for (int step = 0; step < kSteps; ++step) {
#pragma GCC unroll 24
        for (int i = 0; i < kWide; ++i) a[i] = _mm512_dpbf16_ps(a[i], (__m512bh)ones, (__m512bh)signs);
    }
    float sum = 0;
#pragma GCC unroll 24
    for (int i = 0; i < kWide; ++i) sum += _mm512_cvtss_f32(a[i]);
    sink = sum;
    return 2.0 * 32 * kWide * kSteps;
}

// Four sums of 16 x 16, two left and two right tiles, nothing loaded inside the loop.
__attribute__((target("amx-tile,amx-bf16"))) double amx_bf16(size_t, size_t) {
    alignas(64) struct {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t bytes[16] = {};
        uint8_t rows[16] = {};
    } shape;
    for (int i = 0; i < 8; ++i) {
        shape.bytes[i] = 64;
        shape.rows[i] = 16;
    }
    alignas(64) uint32_t ones[256], signs[256];
    for (int i = 0; i < 256; ++i) {
        ones[i] = kOnes;
        signs[i] = kSigns;
    }
    asm volatile("" : : "r"(&shape), "r"(ones), "r"(signs) : "memory");
    _tile_loadconfig(&shape);
    asm volatile("" : : : "memory");
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(4, ones, 64);
    _tile_loadd(5, ones, 64);
    _tile_loadd(6, signs, 64);
    _tile_loadd(7, signs, 64);
    for (int step = 0; step < kSteps; ++step) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_release();
    return 4.0 * 2 * 16 * 16 * 32 * kSteps;
}

std::vector<uint64_t> memory;

// Its share of the memory once; 64-byte lines of which the compiler must load everything.
__attribute__((target("avx2"))) double read_memory(size_t thread, size_t threads) {
    const size_t lines = memory.size() / 8, begin = lines * thread / threads,
                 end = lines * (thread + 1) / threads;
    const __m256i* at = reinterpret_cast<const __m256i*>(memory.data());
    __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
    size_t i = begin;
    for (; i + 2 <= end; i += 2) {
        a = _mm256_xor_si256(a, _mm256_loadu_si256(at + 2 * i));
        b = _mm256_xor_si256(b, _mm256_loadu_si256(at + 2 * i + 1));
        c = _mm256_xor_si256(c, _mm256_loadu_si256(at + 2 * i + 2));
        d = _mm256_xor_si256(d, _mm256_loadu_si256(at + 2 * i + 3));
    }
    a = _mm256_xor_si256(_mm256_xor_si256(a, b), _mm256_xor_si256(c, d));
    sink = static_cast<float>(_mm256_extract_epi64(a, 0));
    return 64.0 * static_cast<double>(i - begin);
}

bool has_amx() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & 1u << 22) || !(d & 1u << 24)) return false;
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0;  // permission to use the tile registers
}

std::vector<int> allowed_cpus() {
    cpu_set_t set;
    sched_getaffinity(0, sizeof set, &set);
    std::vector<int> cpus;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
        if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
    return cpus;
}

// Units per second of all threads together, in one run.
double rate(double (*loop)(size_t, size_t), size_t threads, double seconds) {
    static const std::vector<int> cpus = allowed_cpus();
    std::atomic<size_t> ready{0};
    std::vector<double> rates(threads);
    std::vector<std::thread> pool;
    for (size_t t = 0; t < threads; ++t)
        pool.emplace_back([&, t] {
            cpu_set_t mine;
            CPU_ZERO(&mine);
            CPU_SET(cpus[t % cpus.size()], &mine);
            sched_setaffinity(0, sizeof mine, &mine);
            loop(t, threads);
            ++ready;
            while (ready < threads) std::this_thread::yield();
            double units = 0, start = now(), end = start;
            while (end - start < seconds) {
                units += loop(t, threads);
                end = now();
            }
            rates[t] = units / (end - start);
        });
    double sum = 0;
    for (size_t t = 0; t < threads; ++t) {
        pool[t].join();
        sum += rates[t];
    }
    return sum;
}

double best_rate(double (*loop)(size_t, size_t), size_t threads, double seconds) {
    double best = 0;
    for (int run = 0; run < 5; ++run) best = std::max(best, rate(loop, threads, seconds / 5));
    return best;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 4) {
        std::fprintf(stderr, "usage: peak SECONDS MEGABYTES THREADS...\n");
        return 2;
    }
    const double seconds = std::atof(argv[1]);
    memory.assign(static_cast<size_t>(std::atoll(argv[2])) << 17, 1);
    struct Loop {
        const char* name;
        double (*run)(size_t, size_t);
        bool here;
    };
    const Loop loops[] = {
        {"avx2_f32", avx2_f32, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")},
        {"avx512_f32", avx512_f32, __builtin_cpu_supports("avx512f") != 0},
        {"avx512_bf16", avx512_bf16, __builtin_cpu_supports("avx512bf16") != 0},
        {"amx_bf16", amx_bf16, has_amx()},
        {"read", read_memory, __builtin_cpu_supports("avx2") != 0},
    };
    std::printf("{");
    for (int i = 3; i < argc; ++i) {
        std::printf("%s\"%s\": {", i == 3 ? "" : ", ", argv[i]);
        const char* comma = "";
        for (const Loop& loop : loops) {
            if (!loop.here) continue;
            std::printf("%s\"%s\": %.2f", comma, loop.name,
                        best_rate(loop.run, std::strtoul(argv[i], nullptr, 10), seconds) / 1e9);
            comma = ", ";
        }
        std::printf("}");
    }
    std::printf("}\n");
}
