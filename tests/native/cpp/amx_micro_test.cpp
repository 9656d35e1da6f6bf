// The AMX micro-kernels against scalar arithmetic in the order the Intel SDM gives, bit for bit, and the tile
// instructions they execute against the plan in docs/kernels.md, exactly.
//
//   amx_micro_test check     prints what was checked; exits with 1 on the first difference
//   amx_micro_test plan      a line of JSON per case: what one panel of a DeepSeek-V3 expert takes
//
// Runs on a CPU with AMX, or with ../amxemu preloaded; only the latter counts.
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "dropout.h"
#define AMXEMU_WEAK __attribute__((weak))
#include "../amxemu/amxemu.h"

namespace kt {
namespace {

#include "generic/scalar.inl"
#include "isa/amx_micro.inl"

// Steps of `kK` elements are "pieces" here, as a block is also a row block.
constexpr int64_t kColumns = 32;

[[noreturn]] void fail(const char* what, int count, int64_t pieces, bool accumulate) {
    std::printf("FAIL: %s (rows %d, pieces %ld, accumulate %d)\n", what, count, long(pieces),
                int(accumulate));
    std::exit(1);
}

bool counted() { return amxemu_active != nullptr && amxemu_active(); }

using Counts = struct ::amxemu_counts;

Counts counts() {
    Counts c{};
    if (counted()) amxemu_counts(&c);
    return c;
}

class Random {
  public:
    explicit Random(uint32_t seed) : state_(seed * 2654435761u + 1) {}
    uint32_t bits() {
        state_ ^= state_ << 13;
        state_ ^= state_ >> 17;
        return state_ ^= state_ << 5;
    }
    float uniform() { return static_cast<float>(bits() >> 8) / 8388608.0f - 1.0f; }

  private:
    uint32_t state_;
};

template <class T>
struct Aligned {
    explicit Aligned(int64_t n)
        : data(static_cast<T*>(std::aligned_alloc(64, (n * sizeof(T) + 63) / 64 * 64))) {
        std::memset(data, 0, n * sizeof(T));
    }
    ~Aligned() { std::free(data); }
    Aligned(const Aligned&) = delete;
    T* data;
};

// Logical x [rows][depth] and w [depth][32], with the packed copies that a micro-kernel reads.
template <class M>
struct Problem {
    using T = typename M::T;
    using Sum = typename M::Sum;
    int count;
    int64_t pieces, depth;
    std::vector<T> x, w;
    Aligned<T> left, panel;
    Aligned<Sum> tile;  // one row more than the kernel may write
    std::vector<Sum> before;

    template <class Draw, class DrawSum>
    Problem(int rows, int64_t n, const Draw& draw, const DrawSum& draw_sum)
        : count(rows),
          pieces(n),
          depth(n * M::kK),
          x(rows * depth),
          w(depth * kColumns),
          left(rows * depth),
          panel(depth * kColumns),
          tile((M::kMaxRows + 1) * kColumns),
          before((M::kMaxRows + 1) * kColumns) {
        for (T& v : x) v = draw();
        for (T& v : w) v = draw();
        for (Sum& v : before) v = draw_sum();
        for (int64_t r = 0; r < count; ++r)
            for (int64_t k = 0; k < depth; ++k)
                left.data[(k / M::kK * count + r) * M::kK + k % M::kK] = x[r * depth + k];
        for (int64_t k = 0; k < depth; ++k)
            for (int64_t n = 0; n < kColumns; ++n)
                panel.data[k / M::kPack * kColumns * M::kPack + n * M::kPack + k % M::kPack] =
                    w[k * kColumns + n];
        reset();
    }
    void reset() { std::memcpy(tile.data, before.data(), before.size() * sizeof(Sum)); }
};

// What the SDM says of TDPBF16PS, piece after piece. Compiled by itself: it needs its MXCSR.
[[gnu::noinline]] void reference(const Problem<MicroAmx>& p, bool accumulate, float* to) {
    const unsigned caller = _mm_getcsr();
    _mm_setcsr(0x9fc0);  // nearest even, denormals are zero, flush to zero, exceptions masked
    __asm__ volatile("" : : : "memory");
    for (int64_t r = 0; r < p.count; ++r)
        for (int64_t n = 0; n < kColumns; ++n) {
            float sum = accumulate ? p.before[r * kColumns + n] : 0.0f;
            for (int64_t piece = 0; piece < p.pieces; ++piece) {
                float chain[2] = {0.0f, 0.0f};
                for (int64_t k = piece * 32; k < piece * 32 + 32; ++k)
                    chain[k % 2] = std::fma(to_float(p.x[r * p.depth + k]), to_float(p.w[k * kColumns + n]),
                                            chain[k % 2]);
                sum = sum + (chain[0] + chain[1]);
            }
            to[r * kColumns + n] = sum;
        }
    __asm__ volatile("" : : : "memory");
    _mm_setcsr(caller);
}

void reference(const Problem<MicroAmxInt8>& p, bool accumulate, int32_t* to) {
    for (int64_t r = 0; r < p.count; ++r)
        for (int64_t n = 0; n < kColumns; ++n) {
            int32_t sum = accumulate ? p.before[r * kColumns + n] : 0;
            for (int64_t k = 0; k < p.depth; ++k) sum += p.x[r * p.depth + k] * p.w[k * kColumns + n];
            to[r * kColumns + n] = sum;
        }
}

// Works on memory of its own between tile operations, as a decoder would.
struct CountingJob {
    int64_t steps = 0;
    float out[16] = {};
    void step() {
        ++steps;
        _mm512_storeu_ps(out, _mm512_add_ps(_mm512_loadu_ps(out), _mm512_set1_ps(float(steps))));
    }
};

// The tile plan: what one run() executes.
template <class M>
struct Plan {
    uint64_t loads, products, stores, zeros, product_rows, loaded_bytes;

    Plan(int count, int64_t pieces, bool accumulate) {
        const uint64_t n = pieces, sums = count > 16 ? 4 : 2, lefts = count > 16 ? 2 : 1;
        products = n * sums;
        stores = sums;
        zeros = accumulate ? 0 : sums;
        loads = n * (lefts + 2) + (accumulate ? sums : 0);
        product_rows = n * 2 * count;
        loaded_bytes = n * (64 * count + 2048) + (accumulate ? 128 * count : 0);
    }
    // The products of run() calls so far; main() prints them for the test to compare with the emulator's.
    static inline std::atomic<uint64_t> planned{0};

    bool matches(const Counts& from, const Counts& to) const {
        const uint64_t bf16 = to.tdpbf16ps - from.tdpbf16ps, int8 = to.tdpbssd - from.tdpbssd;
        const bool is_bf16 = M::kPack == 2;
        return to.tileloadd - from.tileloadd == loads && to.tilestored - from.tilestored == stores &&
               to.tilezero - from.tilezero == zeros && bf16 == (is_bf16 ? products : 0) &&
               int8 == (is_bf16 ? 0 : products) && to.product_rows - from.product_rows == product_rows &&
               to.loaded_bytes - from.loaded_bytes == loaded_bytes;
    }
};

template <class M>
void check_one(Problem<M>& p, bool accumulate, bool configures) {
    std::vector<typename M::Sum> expected(p.before);
    reference(p, accumulate, expected.data());
    p.reset();
    CountingJob job;
    const Counts from = counts();
    M::run(p.count, p.left.data, p.pieces, p.panel.data, p.tile.data, accumulate, job);
    Plan<M>::planned += Plan<M>(p.count, p.pieces, accumulate).products;
    const Counts to = counts();
    if (std::memcmp(p.tile.data, expected.data(), expected.size() * sizeof(expected[0])) != 0)
        fail("sums differ, or rows beyond were written", p.count, p.pieces, accumulate);
    const float total = 0.5f * float(p.pieces) * float(p.pieces + 1);
    if (job.steps != p.pieces || job.out[0] != total || job.out[15] != total)
        fail("job.step() was not called once per piece", p.count, p.pieces, accumulate);
    if (!counted()) return;
    if (!Plan<M>(p.count, p.pieces, accumulate).matches(from, to))
        fail("other tile operations than planned", p.count, p.pieces, accumulate);
    if (to.ldtilecfg - from.ldtilecfg != (configures ? 1 : 0))
        fail("configured when the count stayed, or not when it changed", p.count, p.pieces, accumulate);
}

// Ordinary numbers; numbers whose products and sums fall among denormals; any finite bits.
Bf16 draw_bf16(Random& random, int kind) {
    if (kind == 0) return to_bf16(random.uniform());
    if (kind == 1) return to_bf16(std::ldexp(random.uniform(), -55 - int(random.bits() % 80)));
    Bf16 v{static_cast<uint16_t>(random.bits() >> 7)};
    if ((v.bits & 0x7f80) > 0x5800) v.bits &= 0xbfff;  // at most 2^49: no sum of products overflows
    return v;
}

void check_all_shapes() {
    int64_t runs = 0;
    MicroAmx::enter();
    for (int count = 1; count <= 32; ++count)
        for (int64_t pieces = 1; pieces <= 5; ++pieces)
            for (const bool accumulate : {false, true}) {
                Random random(count * 100 + pieces * 10 + accumulate);
                const int kind = (count + pieces) % 3;
                Problem<MicroAmx> p(
                    count, pieces, [&] { return draw_bf16(random, kind); },
                    [&] { return to_float(draw_bf16(random, kind)) * (1.0f + random.uniform() / 256.0f); });
                check_one(p, accumulate, pieces == 1 && !accumulate);
                Problem<MicroAmxInt8> q(
                    count, pieces, [&] { return static_cast<int8_t>(random.bits() >> 9); },
                    [&] { return static_cast<int32_t>(random.bits() >> 8) - (1 << 23); });
                check_one(q, accumulate, false);
                runs += 2;
            }
    MicroAmx::leave();
    std::printf("ok: %ld runs equal the reference bit for bit%s\n", long(runs),
                counted() ? ", tile operations as planned" : "");
}

// A NaN or an infinity stays in its row or its column.
void check_non_finite() {
    MicroAmx::enter();
    for (const int count : {1, 16, 17, 31}) {
        Random random(count);
        Problem<MicroAmx> p(count, 3, [&] { return draw_bf16(random, 0); }, [] { return 0.0f; });
        const int row = count - 1;
        const int64_t k = 40, column = 21;
        p.left.data[(k / 32 * count + row) * 32 + k % 32] = Bf16{0x7fc0};
        p.panel.data[k / 2 * 64 + column * 2 + k % 2] = Bf16{0x7f80};
        CountingJob job;
        MicroAmx::run(count, p.left.data, 3, p.panel.data, p.tile.data, false, job);
        Plan<MicroAmx>::planned += Plan<MicroAmx>(count, 3, false).products;
        for (int r = 0; r < count; ++r)
            for (int n = 0; n < kColumns; ++n) {
                const float v = p.tile.data[r * kColumns + n];
                const bool right = r == row      ? std::isnan(v)
                                   : n == column ? !std::isfinite(v)
                                                 : std::isfinite(v);
                if (!right) fail("a NaN or an infinity spread", count, 3, false);
            }
    }
    MicroAmx::leave();
    std::printf("ok: NaN and infinity stay in their row and column\n");
}

// Tiles belong to threads: each configures its own, even when another has just done the same.
void check_threads() {
    constexpr int kThreads = 4, kRounds = 20;
    std::barrier together(kThreads);
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t)
        threads.emplace_back([t, &together] {
            MicroAmx::enter();
            for (int round = 0; round < kRounds; ++round) {
                const int count = 1 + 11 * round % 32;
                Random random(1000 * t + round);
                Problem<MicroAmx> p(
                    count, 1 + t, [&] { return draw_bf16(random, 0); }, [&] { return random.uniform(); });
                std::vector<float> expected(p.before);
                reference(p, true, expected.data());
                CountingJob job;
                together.arrive_and_wait();
                MicroAmx::run(count, p.left.data, p.pieces, p.panel.data, p.tile.data, true, job);
                if (std::memcmp(p.tile.data, expected.data(), expected.size() * sizeof(float)) != 0)
                    fail("sums differ in a thread", count, p.pieces, true);
                Plan<MicroAmx>::planned += Plan<MicroAmx>(count, p.pieces, true).products;
            }
            MicroAmx::leave();
        });
    for (std::thread& thread : threads) thread.join();
    std::printf("ok: %d threads\n", kThreads);
}

// enter() does not trust what another user of tiles left behind; 16 and 32 rows share a configuration.
void check_configuration() {
    Random random(7);
    Problem<MicroAmxInt8> p(20, 2, [&] { return static_cast<int8_t>(random.bits()); }, [] { return 0; });
    MicroAmxInt8::enter();
    check_one(p, false, true);
    __asm__ volatile("ldtilecfg %0" : : "m"(kTileConfigs.of_count[3]));
    MicroAmxInt8::enter();
    check_one(p, true, true);
    MicroAmxInt8::leave();
    MicroAmxInt8::enter();
    check_one(p, false, true);
    Problem<MicroAmxInt8> whole(32, 1, [&] { return static_cast<int8_t>(random.bits()); }, [] { return 0; });
    Problem<MicroAmxInt8> half(16, 1, [&] { return static_cast<int8_t>(random.bits()); }, [] { return 0; });
    check_one(whole, false, true);
    check_one(half, false, false);
    check_one(whole, false, false);
    MicroAmxInt8::leave();
    std::printf("ok: configured when needed\n");
}

struct NoJob {
    void step() {}
};

// One panel (32 columns) of a DeepSeek-V3 expert for `rows` tokens, `piece_block` pieces per pass.
void print_plan(int rows, int64_t depth, int64_t piece_block) {
    const int64_t pieces = depth / 32;
    Aligned<Bf16> left(32 * depth), panel(depth * kColumns);
    Aligned<float> tile(int64_t{rows} * kColumns);
    NoJob job;
    MicroAmx::enter();
    const Counts from = counts();
    for (int64_t piece = 0; piece < pieces; piece += piece_block)
        for (int row = 0; row < rows; row += 32) {
            const int count = rows - row < 32 ? rows - row : 32;
            MicroAmx::run(count, left.data, piece_block, panel.data + piece * kPanelPiece / 2,
                          tile.data + row * kColumns, piece > 0, job);
        }
    const Counts to = counts();
    MicroAmx::leave();
    std::printf("{\"rows\": %d, \"depth\": %ld, \"depth_block\": %ld", rows, long(depth),
                long(piece_block * 32));
#define PRINT(name) std::printf(", \"" #name "\": %lu", static_cast<unsigned long>(to.name - from.name));
    AMXEMU_COUNTERS(PRINT)
#undef PRINT
    std::printf("}\n");
}

}  // namespace
}  // namespace kt

int main(int argc, char** argv) {
    if (syscall(SYS_arch_prctl, 0x1023, 18) != 0) {  // ARCH_REQ_XCOMP_PERM, tile data
        std::perror("arch_prctl");
        return 2;
    }
    std::printf("AMX %s\n", kt::counted() ? "emulated" : "of this CPU");
    if (argc > 1 && std::strcmp(argv[1], "plan") == 0) {
        for (const int rows : {16, 64, 256})
            for (const int64_t depth : {7168, 2048})
                for (const int64_t piece_block : {depth / 32, int64_t{16}})
                    kt::print_plan(rows, depth, piece_block);
        return 0;
    }
    kt::check_all_shapes();
    kt::check_non_finite();
    kt::check_threads();
    kt::check_configuration();
    std::printf("planned products: %lu bf16, %lu int8\n",
                static_cast<unsigned long>(kt::Plan<kt::MicroAmx>::planned),
                static_cast<unsigned long>(kt::Plan<kt::MicroAmxInt8>::planned));
    return 0;
}
