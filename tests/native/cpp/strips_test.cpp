// The weight formats' decoders: the AVX-512 strips against the scalar ones, bit for bit, on random bytes.
//
//   strips_test [--bench]            0 if they agree; with --bench also the time per strip
//   strips_test --decode FORMAT SCALES COLS ROW_BYTES COL_BYTES SCALE_ROW_BYTES BLOCK_ROWS BLOCK_COLS
//                                    rows of a matrix from stdin, preceded by their number, the number of
//                                    bytes and of scale bytes (int64), as float32 to stdout
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <string>
#include <vector>
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#include "dropout.h"
#include "matrix.h"

namespace kt {
namespace {

#include "generic/scalar.inl"
#include "generic/formats.inl"
#if defined(__AVX512BF16__)
#include "isa/avx512_strips.inl"
#endif

#define KT_NAME(name) #name,
const char* const kNames[] = {KT_FORMATS(KT_NAME)};
#undef KT_NAME
const char* const kScaleNames[] = {"none", "f32", "bf16", "f16", "ue8m0"};

template <class Body>
void for_format(Format f, const Body& body) {
    switch (f) {
#define KT_CASE(name)  \
    case Format::name: \
        return body.template operator()<Format::name>();
        KT_FORMATS(KT_CASE)
#undef KT_CASE
    }
}

int find(const char* const* names, size_t count, const char* name) {
    for (size_t i = 0; i < count; ++i)
        if (strcmp(names[i], name) == 0) return static_cast<int>(i);
    fprintf(stderr, "unknown name %s\n", name);
    exit(2);
}

void read_all(void* to, size_t bytes) {
    if (fread(to, 1, bytes, stdin) != bytes) {
        fprintf(stderr, "standard input ended early\n");
        exit(2);
    }
}

int decode(char** args) {
    Matrix m{};
    m.format = static_cast<Format>(find(kNames, std::size(kNames), args[0]));
    m.scale_type = static_cast<ScaleType>(find(kScaleNames, std::size(kScaleNames), args[1]));
    m.cols = atoll(args[2]);
    m.row_bytes = atoll(args[3]);
    m.col_bytes = atoll(args[4]);
    m.scale_row_bytes = atoll(args[5]);
    m.block_rows = atoll(args[6]);
    m.block_cols = atoll(args[7]);
    int64_t sizes[3];
    read_all(sizes, sizeof(sizes));
    m.rows = sizes[0];
    // malloc'ed exactly: a sanitizer sees reads beyond.
    std::vector<uint8_t> data(static_cast<size_t>(sizes[1])), scales(static_cast<size_t>(sizes[2]));
    read_all(data.data(), data.size());
    read_all(scales.data(), scales.size());
    m.data = data.data();
    m.scales = scales.data();
    std::vector<float> row(static_cast<size_t>(m.cols));
    for (int64_t n = 0; n < m.rows; ++n) {
        for_format(m.format, [&]<Format F>() {
            for (int64_t k = 0; k < m.cols; k += kStrip)
                strip<F>(m, n, k, min_of(kStrip, m.cols - k), row.data() + k);
        });
        fwrite(row.data(), sizeof(float), row.size(), stdout);
    }
    return 0;
}

#if defined(__AVX512BF16__)

bool has_scales(Format f) {
    return f == Format::fp8 || f == Format::mxfp4 || f == Format::nvfp4 || f == Format::int8 ||
           f == Format::int4 || f == Format::uint4;
}

uint64_t state = 88172645463325252u;
uint64_t next() {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

// A case: random bytes; scales ordinary, or any bits at all.
struct Case {
    Matrix m{};
    std::vector<uint8_t> data, scales;

    Case(Format f, ScaleType type, int64_t rows, int64_t cols, int64_t block_rows, int64_t block_cols,
         bool wild) {
        int64_t row_bytes = 0;
        for_format(f, [&]<Format F>() {
            row_bytes = cols / FormatTraits<F>::kElements * FormatTraits<F>::kBytes;
            m.col_bytes = FormatTraits<F>::kBytes;
        });
        row_bytes += 13;  // nothing is aligned
        const int64_t scale_cols = pieces(cols, block_cols) * (f == Format::uint4 ? 2 : 1);
        const int64_t scale_row = scale_cols * scale_size(type) + 3;
        data.resize(static_cast<size_t>(rows * row_bytes));
        scales.resize(static_cast<size_t>(pieces(rows, block_rows) * scale_row));
        for (auto& byte : data) byte = static_cast<uint8_t>(next());
        for (auto& byte : scales) byte = static_cast<uint8_t>(next());
        m.format = f;
        m.scale_type = type;
        m.data = data.data();
        m.row_bytes = row_bytes;
        m.scales = has_scales(f) ? scales.data() : nullptr;
        m.scale_row_bytes = scale_row;
        m.block_rows = block_rows;
        m.block_cols = block_cols;
        m.rows = rows;
        m.cols = cols;
        if (!wild) tame(f, type, scale_row, scale_cols);
    }

    // Scales around one, so that no strip is all infinite or zero.
    void tame(Format f, ScaleType type, int64_t scale_row, int64_t scale_cols) {
        for (int64_t n = 0; n < static_cast<int64_t>(scales.size()) / scale_row; ++n)
            for (int64_t c = 0; c < scale_cols; ++c) {
                uint8_t* p = scales.data() + n * scale_row + c * scale_size(type);
                const float v = 0.25f + static_cast<float>(next() % 4096) / 1024.0f;
                const uint32_t bits = float_bits(v);
                if (type == ScaleType::f32) memcpy(p, &bits, 4);
                if (type == ScaleType::bf16) memcpy(p, reinterpret_cast<const char*>(&bits) + 2, 2);
                if (type == ScaleType::f16) p[1] = static_cast<uint8_t>(0x34 + next() % 8);
                if (type == ScaleType::ue8m0) *p = static_cast<uint8_t>(120 + next() % 16);
            }
        const bool k_quant = f == Format::q4_k || f == Format::q5_k || f == Format::q6_k;
        for_format(f, [&]<Format F>() {
            if (FormatTraits<F>::kElements == 1 || has_scales(F) || F == Format::bf16) return;
            for (int64_t n = 0; n < m.rows; ++n)
                for (int64_t b = 0; b < m.cols / FormatTraits<F>::kElements; ++b) {
                    uint8_t* p = data.data() + n * m.row_bytes + b * FormatTraits<F>::kBytes;
                    if (F == Format::q6_k) p += 208;
                    p[1] = static_cast<uint8_t>((k_quant ? 0x20 : 0x34) + next() % 8);
                    if (F == Format::q5_1 || F == Format::q4_k || F == Format::q5_k)
                        p[3] = static_cast<uint8_t>((k_quant ? 0x20 : 0x34) + next() % 8);
                }
        });
    }
};

// Rounded to nearest even, subnormal values to zero.
uint16_t expected(float v) {
    const uint32_t bits = float_bits(v);
    return (bits & 0x7f800000u) == 0 ? static_cast<uint16_t>(bits >> 16 & 0x8000u) : to_bf16(v).bits;
}

// Whether 32 elements of a row are as they should be.
template <Format F>
int64_t compare_strip(const Case& c, int64_t n, int64_t k, const uint16_t* got) {
    float values[kStrip];
    strip<F>(c.m, n, k, kStrip, values);
    int64_t wrong = 0;
    for (int64_t j = 0; j < kStrip; ++j) {
        const bool nan = values[j] != values[j], got_nan = (got[j] & 0x7fffu) > 0x7f80u;
        const uint16_t want = expected(values[j]);
        // A stored bfloat16 is passed on as it is.
        const bool same = F == Format::bf16 ? got[j] == float_bits(values[j]) >> 16
                          : nan             ? got_nan
                                            : got[j] == want;
        if (!same && ++wrong <= 4)
            fprintf(stderr, "%s, scales %s %ldx%ld: [%ld][%ld]: %04x, required %04x (%g)\n",
                    kNames[static_cast<int>(F)], kScaleNames[static_cast<int>(c.m.scale_type)],
                    static_cast<long>(c.m.block_rows), static_cast<long>(c.m.block_cols),
                    static_cast<long>(n), static_cast<long>(k + j), got[j], want, values[j]);
    }
    return wrong;
}

template <Format F>
int64_t compare(const Case& c) {
    const Strip<F> decoder(c.m);
    int64_t wrong = 0;
    for (int64_t n = 0; n < c.m.rows; ++n)
        for (int64_t k = 0; k + kStrip <= c.m.cols; k += kStrip) {
            uint16_t got[kStrip];
            _mm512_storeu_si512(got, decoder.bf16(n, k));
            wrong += compare_strip<F>(c, n, k, got);
        }
    return wrong;
}

// Units that a decoder places in a panel itself, which has two depths of each column side by side.
template <Format F, class S>
int64_t compare_units(const Case& c, bool required) {
    const S decoder(c.m);
    int64_t wrong = 0;
    for (int64_t k = 0; k + kStrip <= c.m.cols; k += kStrip)
        for (int64_t n = 0; n + 8 <= c.m.rows; n += 8)
            for (const bool along_columns : {false, true}) {
                uint16_t panel[16 * kPanelStep / 2], got[kStrip];
                char* to = reinterpret_cast<char*>(panel);
                if (!(along_columns ? decoder.depths(n, k, to) : decoder.rows(n, k, to))) {
                    wrong += required;
                    continue;
                }
                for (int64_t i = 0; i < 8; ++i) {
                    for (int64_t j = 0; j < kStrip; ++j) {
                        const int64_t depth = along_columns ? i : j, column = along_columns ? j : i;
                        got[j] = panel[depth / 2 * kPanelStep / 2 + column * 2 + depth % 2];
                    }
                    wrong += compare_strip<F>(c, n + i, k, got);
                }
            }
    return wrong;
}

// A part of a strip is the beginning of the whole one.
template <Format F>
int64_t compare_parts(const Case& c) {
    int64_t wrong = 0;
    for (int64_t count = 1; count <= kStrip; ++count) {
        float whole[kStrip], part[kStrip + 1];
        part[count] = 42.0f;
        strip<F>(c.m, 1, kStrip, kStrip, whole);
        strip<F>(c.m, 1, kStrip, count, part);
        bool same = part[count] == 42.0f;
        for (int64_t j = 0; j < count; ++j)  // of two NaNs either may be the product
            same &=
                float_bits(whole[j]) == float_bits(part[j]) || (whole[j] != whole[j] && part[j] != part[j]);
        wrong += !same;
    }
    if (wrong > 0)
        fprintf(stderr, "%s: %ld parts of a strip differ from it\n", kNames[static_cast<int>(F)],
                static_cast<long>(wrong));
    return wrong;
}

struct Blocks {
    int64_t rows, cols;
};

template <Format F>
int64_t check() {
    constexpr int64_t kRows = 37, kCols = 768;
    std::vector<ScaleType> types = {ScaleType::none};
    std::vector<Blocks> blocks = {{1, kCols}};
    if (F == Format::mxfp4) {
        types = {ScaleType::ue8m0};
        blocks = {{1, 32}};
    } else if (F == Format::nvfp4) {
        types = {ScaleType::f32, ScaleType::bf16, ScaleType::f16};
        blocks = {{kRows, kCols}};
    } else if (has_scales(F)) {
        types = {ScaleType::f32, ScaleType::bf16, ScaleType::f16, ScaleType::ue8m0};
        blocks = {{1, kCols}, {1, 32}, {1, 128}, {1, 96}};
        if (F == Format::fp8)
            blocks.insert(blocks.end(), {{16, 128}, {128, 128}, {5, 2 * kCols}, {12, 64}, {24, 96}});
    }
    int64_t wrong = 0;
    for (const ScaleType type : types)
        for (const Blocks b : blocks)
            for (const bool wild : {false, true}) {
                const Case c(F, type, kRows, kCols, b.rows, b.cols, wild);
                wrong += compare<F>(c) + compare_parts<F>(c);
                if constexpr (F == Format::fp8) {
                    wrong += compare_units<F, Strip<F>>(c, b.rows >= 8 && b.rows % 8 == 0);
                    if (Fp8RowStrip::fits(c.m)) wrong += compare_units<F, Fp8RowStrip>(c, !wild);
                }
            }
    return wrong;
}

// Eight rows at a time, as a panel is filled; most formats' matrix and panel fit the first-level cache.
template <Format F>
void bench(ScaleType type, int64_t block_rows, int64_t block_cols) {
    constexpr int64_t kRows = 16, kCols = 1024;
    const Case c(F, type, kRows, kCols, block_rows, block_cols, false);
    const Matrix m = c.m;
    alignas(64) static uint16_t panel[8 * kStrip * 64];
    const auto seconds = [&](const auto& body) {
        double best = 1e9;
        for (int repeat = 0; repeat < 200; ++repeat) {
            const auto start = std::chrono::steady_clock::now();
            body();
            const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
            best = took.count() < best ? took.count() : best;
        }
        return best;
    };
    const double fast = seconds([&] {
        const Strip<F> decoder(m);
        for (int64_t n = 0; n < kRows; n += 8)
            for (int64_t k = 0; k < kCols; k += kStrip)
#pragma GCC unroll 8
                for (int64_t i = 0; i < 8; ++i)
                    _mm512_store_si512(panel + (k / kStrip * 8 + i) * kStrip, decoder.bf16(n + i, k));
        __asm__ volatile("" ::: "memory");
    });
    const double plain = seconds([&] {
        float* to = reinterpret_cast<float*>(panel);
        for (int64_t n = 0; n < kRows; n += 8)
            for (int64_t k = 0; k < kCols; k += kStrip)
                for (int64_t i = 0; i < 8; ++i) strip<F>(m, n + i, k, kStrip, to + i * kStrip);
        __asm__ volatile("" ::: "memory");
    });
    const double strips = kRows * kCols / kStrip;
    printf("%-6s scales %-5s %4ld x %-4ld %6.2f ns/strip, scalar source %6.2f\n", kNames[static_cast<int>(F)],
           kScaleNames[static_cast<int>(type)], static_cast<long>(block_rows), static_cast<long>(block_cols),
           fast / strips * 1e9, plain / strips * 1e9);
}

template <Format F>
void benches() {
    if (!has_scales(F)) return bench<F>(ScaleType::none, 1, 1024);
    if (F == Format::mxfp4) return bench<F>(ScaleType::ue8m0, 1, 32);
    if (F == Format::nvfp4) return bench<F>(ScaleType::f32, 16, 1024);
    if (F == Format::fp8) bench<F>(ScaleType::f32, 128, 128);
    if (F == Format::fp8) bench<F>(ScaleType::ue8m0, 128, 128);
    if (F != Format::int4) bench<F>(ScaleType::f32, 1, 1024);
    bench<F>(ScaleType::bf16, 1, F == Format::fp8 ? 1024 : 128);
    if (F == Format::int4) bench<F>(ScaleType::f16, 1, 32);
}

#endif

}  // namespace
}  // namespace kt

int main(int argc, char** argv) {
    if (argc == 10 && strcmp(argv[1], "--decode") == 0) return kt::decode(argv + 2);
#if defined(__AVX512BF16__)
    const bool timed = argc == 2 && strcmp(argv[1], "--bench") == 0;
    if (argc > 1 && !timed) return 2;
    int64_t wrong = 0;
    for (int f = 0; f < 13; ++f) {
        kt::for_format(static_cast<kt::Format>(f), [&]<kt::Format F>() {
            const int64_t here = kt::check<F>();
            printf("%-6s %s\n", kt::kNames[f], here == 0 ? "ok" : "WRONG");
            wrong += here;
            if (timed) kt::benches<F>();
        });
    }
    return wrong == 0 ? 0 : 1;
#else
    fprintf(stderr, "compiled without AVX512_BF16: nothing to compare\n");
    return 2;
#endif
}
