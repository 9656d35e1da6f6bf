// The sweep over panels on AMX: exact sums of small integers, in order, each tile finished before the
// products of the next one, as the emulator's counts tell (../amxemu preloaded; a CPU with AMX does not
// count).
#include "isa/amx.cpp"

#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

#define AMXEMU_WEAK __attribute__((weak))
#include "../amxemu/amxemu.h"

namespace kt::amx {
namespace {

constexpr int64_t kItems = 10, kSlices = 40, kDepth = kSlices * kSlice;
// Along columns: panels and columns of an expert, whose last panel is not whole, and the depth of each of its
// two matrices, one below the other.
constexpr int64_t kPanels = 5, kWidth = kPanels * kColumns - 10, kPartDepth = kDepth / 2;

bool counted() { return amxemu_active != nullptr && amxemu_active(); }

uint64_t products() {
    struct ::amxemu_counts now{};
    if (counted()) amxemu_counts(&now);
    return now.tdpbf16ps;
}

[[noreturn]] void fail(const char* what, int64_t item, const RowBlock& b) {
    std::printf("FAIL: %s (panel %ld, rows from %ld)\n", what, long(item), long(b.begin));
    std::exit(1);
}

template <class T>
T* aligned(int64_t n) {
    return static_cast<T*>(std::aligned_alloc(64, (n * sizeof(T) + 63) / 64 * 64));
}

int64_t value(int64_t row, int64_t k, int64_t prime) { return (row * 7 + k * prime) % 9 - 4; }

// Rows of the panels, one after the other, in one matrix.
struct AlongRows {
    Bf16* const weights = aligned<Bf16>(kItems * kColumns * kDepth);

    AlongRows() {
        for (int64_t n = 0; n < kItems * kColumns; ++n)
            for (int64_t k = 0; k < kDepth; ++k)
                weights[n * kDepth + k] = to_bf16(static_cast<float>(weight(n / kColumns, n % kColumns, k)));
    }
    static int64_t weight(int64_t item, int64_t column, int64_t k) {
        return value(item * kColumns + column, k, 5);
    }
    Source source(int64_t item) const {
        Matrix m{};
        m.format = Format::bf16;
        m.data = reinterpret_cast<const uint8_t*>(weights);
        m.row_bytes = kDepth * 2;
        m.col_bytes = 2;
        m.rows = kItems * kColumns;
        m.cols = kDepth;
        return Source{{make_part(m, false, item * kColumns, 0, 2, 0), Part()}, 1};
    }
};

// Columns of two experts, each of two matrices. Groups of panels begin in one expert and end in the other,
// and blocks of depth in one matrix and the other.
struct AlongColumns {
    Bf16* const weights = aligned<Bf16>(kItems / kPanels * kDepth * kWidth);

    AlongColumns() {
        for (int64_t e = 0; e < kItems / kPanels; ++e)
            for (int64_t k = 0; k < kDepth; ++k)
                for (int64_t n = 0; n < kWidth; ++n)
                    weights[(e * kDepth + k) * kWidth + n] =
                        to_bf16(static_cast<float>(weight(e * kPanels + n / kColumns, n % kColumns, k)));
    }
    static int64_t weight(int64_t item, int64_t column, int64_t k) {
        return item % kPanels * kColumns + column < kWidth ? value(item * kColumns + column, k, 5) : 0;
    }
    Source source(int64_t item) const {
        Source source{{}, 2};
        for (int part = 0; part < 2; ++part) {
            Matrix m{};
            m.format = Format::bf16;
            m.data =
                reinterpret_cast<const uint8_t*>(weights + (item / kPanels * 2 + part) * kPartDepth * kWidth);
            m.row_bytes = kWidth * 2;
            m.col_bytes = 2;
            m.rows = kPartDepth;
            m.cols = kWidth;
            source.part[part] = make_part(m, true, item % kPanels * kColumns, 0, 2, part * (kSlices / 2));
        }
        return source;
    }
};

template <class Weights>
void check() {
    const RowBlock blocks[] = {{0, 32, 0}, {32, 16, 0}, {48, 9, 0}};
    constexpr int64_t kBlocks = 3, kRows = 57;
    const Weights weights;

    using C = ComputeBf16<MicroAmx>;
    Pass pass{};
    pass.blocks = blocks;
    pass.span_rows = 64;
    Moe<Bf16, C> moe{pass, {}};
    for (int i = 0; i < 2; ++i)
        moe.s.panel[i] = moe.s.frozen_panel[i] =
            aligned<Bf16>(panels_ahead<C>(true) * MicroAmx::kPanelBytes / 2);
    moe.s.tiles = aligned<float>(MicroAmx::kSumPanels * pass.span_rows * kColumns);
    moe.s.lines = aligned<const char*>(MicroAmx::kMaxRows * kTouchLines);
    Bf16* const left = aligned<Bf16>(kRows * kDepth);
    for (const RowBlock& b : blocks)
        for (int64_t i = 0; i < b.count; ++i)
            for (int64_t k = 0; k < kDepth; ++k)
                left[b.begin * kDepth + (k / 32 * b.count + i) * 32 + k % 32] =
                    to_bf16(static_cast<float>(value(b.begin + i, k, 2)));

    int64_t finished = 0;
    uint64_t begun[kItems][kBlocks];
    C::enter();
    moe.sweep(
        kItems, kSlices, [&](int64_t j) { return weights.source(j); },
        [&](int64_t) { return decltype(moe)::BlockRange{0, kBlocks}; },
        [&](const RowBlock& b) { return static_cast<const Bf16*>(left + b.begin * kDepth); },
        [&](int64_t j, const RowBlock& b, Touch&) { begun[j][&b - blocks] = products(); },
        [&](int64_t j, const RowBlock& b, const float* tile) {
            if (j != finished / kBlocks || &b - blocks != finished % kBlocks) fail("out of order", j, b);
            for (int64_t i = 0; i < b.count; ++i)
                for (int64_t n = 0; n < kColumns; ++n) {
                    int64_t sum = 0;
                    for (int64_t k = 0; k < kDepth; ++k)
                        sum += value(b.begin + i, k, 2) * Weights::weight(j, n, k);
                    if (tile[i * kColumns + n] != static_cast<float>(sum)) fail("sums differ", j, b);
                }
            // The last cut of three has 14 pieces of depth.
            const uint64_t complete = begun[j][&b - blocks] + 14 * (b.count > 16 ? 4 : 2);
            if (counted() && products() != complete) fail("finished at another time", j, b);
            ++finished;
        });
    C::leave();
    if (finished != kItems * kBlocks) fail("tiles left", finished, blocks[0]);
    std::printf("ok: %ld tiles%s\n", long(finished), counted() ? ", before the products of the next" : "");
}

}  // namespace
}  // namespace kt::amx

int main() {
    if (syscall(SYS_arch_prctl, 0x1023, 18) != 0) {  // ARCH_REQ_XCOMP_PERM, tile data
        std::perror("arch_prctl");
        return 2;
    }
    kt::amx::check<kt::amx::AlongRows>();
    kt::amx::check<kt::amx::AlongColumns>();
    return 0;
}
