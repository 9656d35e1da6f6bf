// Panels decoded ahead, inside or between the products of another, against the plain decoder, bit for bit,
// and the products' sums against those of the plain micro-kernel. Compiled once for an instruction set:
//
//   -DKT_ISA=avx512 -DKT_SOURCE='"isa/avx512.cpp"' and its flags. Exit status 0 if all agree.
#include KT_SOURCE

#include <cstdio>
#include <cstdlib>
#include <vector>

namespace kt::KT_ISA {
namespace {

uint64_t state = 88172645463325252u;
uint64_t next() {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}
int64_t below(int64_t n) { return static_cast<int64_t>(next() % static_cast<uint64_t>(n)); }

constexpr int64_t elements_of(Format format) {
#define KT_FORMAT(F) FormatTraits<Format::F>::kElements,
    constexpr int64_t elements[] = {KT_FORMATS(KT_FORMAT)};
#undef KT_FORMAT
    return elements[static_cast<int>(format)];
}

// Random bytes in memory of exactly their size.
struct Stored {
    std::vector<uint8_t> data, scales;
    Matrix m{};

    Stored(Format format, ScaleType type, int64_t rows, int64_t cols, bool by_block, bool wild,
           bool transposed) {
        m.format = format;
        m.scale_type = type;
        m.rows = rows;
        m.cols = cols;
        const int64_t element = element_bytes(format);
        m.row_bytes = cols * strip_bytes(format) / (8 * kStrip);
        m.col_bytes = element;
        if (transposed) {
            m.row_bytes = element;
            m.col_bytes = rows * element;
        }
        data.resize(static_cast<size_t>(cols * strip_bytes(format) / (8 * kStrip) * rows));
        for (auto& byte : data) byte = static_cast<uint8_t>(next());
        if (format == Format::fp8 && !wild)  // no NaN
            for (auto& byte : data) byte &= 0xf7;
        m.data = data.data();
        const bool whole = format == Format::nvfp4;
        const bool by_row = format == Format::int8 || format == Format::fp8;
        m.block_rows = by_block ? 48 : whole ? rows : 1;
        m.block_cols = by_block ? 64 : whole || by_row ? cols : 32;
        if (type == ScaleType::none) return;
        const int64_t size = scale_size(type);
        m.scale_row_bytes = pieces(cols, m.block_cols) * size * (format == Format::uint4 ? 2 : 1);
        scales.resize(static_cast<size_t>(pieces(rows, m.block_rows) * m.scale_row_bytes));
        for (auto& byte : scales) byte = static_cast<uint8_t>(next());
        if (!wild) {
            for (size_t i = 0; i < scales.size(); i += static_cast<size_t>(size)) {
                const float scale =
                    static_cast<float>(1 + below(1000)) * 0x1p-12f * (below(2) ? 1.0f : -1.0f);
                const Bf16 rounded = to_bf16(scale);
                if (type == ScaleType::f32) memcpy(&scales[i], &scale, 4);
                if (type == ScaleType::bf16) memcpy(&scales[i], &rounded, 2);
                if (type == ScaleType::f16)
                    scales[i + 1] = static_cast<uint8_t>(0x20 | (scales[i + 1] & 0x9f));
                if (type == ScaleType::ue8m0) scales[i] = static_cast<uint8_t>(100 + below(30));
            }
        }
        m.scales = scales.data();
    }
};

// Bit for bit, but for a NaN's sign: where both factors are one, either may be the product.
bool same(const float* a, const float* b, int64_t count) {
    for (int64_t i = 0; i < count; ++i)
        if (memcmp(a + i, b + i, 4) != 0 && !(a[i] != a[i] && b[i] != b[i])) return false;
    return true;
}

struct Test {
    int64_t failed = 0, done = 0;

    // Both cuts of a panel, each decoded during products with the other.
    void panel(const Source& source, int64_t slices, const char* what) {
        const int64_t floats = kSlice * 2 * kLanes, cut = slices / 2;
        std::vector<float> plain(static_cast<size_t>(slices * floats + 16), 7.0f), ahead = plain;
        const auto aligned = [](std::vector<float>& v) {
            return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(v.data()) + 63) / 64 * 64);
        };
        float *expected = aligned(plain), *got = aligned(ahead);
        decode<float>(source, 0, slices, expected);
        const int count = 1 + static_cast<int>(below(MicroF32::kMaxRows)),
                  blocks = static_cast<int>(below(4));
        std::vector<float> left(static_cast<size_t>(slices * kSlice * count)),
            other(static_cast<size_t>(slices * floats));
        for (auto& v : left) v = static_cast<float>(below(17)) - 8.0f;
        for (auto& v : other) v = static_cast<float>(below(17)) * 0.3f;
        std::vector<float> sums(static_cast<size_t>(count * 2 * kLanes)), plain_sums = sums;
        ComputeF32Ahead::Ahead steps;
        const int64_t ends[] = {0, cut, slices};
        for (int part = 0; part < 2; ++part) {
            const int64_t first = ends[part], last = ends[part + 1];
            if (first == last) continue;
            steps.start({&source, first, last}, got + first * floats, slices * blocks,
                        {&source, last, slices});
            for (int b = 0; b < blocks; ++b) {
                ComputeF32Ahead::run(steps, count, left.data(), slices, other.data(), sums.data(), b > 0,
                                     Touch{nullptr});
                MicroF32::run(count, left.data(), slices * kSlice, other.data(), plain_sums.data(), b > 0);
            }
            steps.finish();
        }
        ++done;
        if (!same(expected, got, slices * floats) ||
            memcmp(sums.data(), plain_sums.data(), sums.size() * 4) != 0) {
            if (++failed < 20) fprintf(stderr, "%s: differs\n", what);
        }
    }

    void format(Format format, ScaleType type, const char* name) {
        const int64_t step = max_of(elements_of(format), 1);
        for (int round = 0; round < 60; ++round) {
            const bool wild = round % 3 == 2;
            const bool by_block = format == Format::fp8 ? round % 2 == 0 : false;
            const bool transposed = element_bytes(format) > 0 && round % 5 == 4;
            // Whole slices and columns, or not.
            const int64_t cols =
                step == 1 ? (round % 4 == 3 ? 65 + below(100) : 32 * (2 + below(5))) : step * (1 + below(2));
            const int64_t rows = round % 4 == 1 ? 33 + below(60) : 32 * (2 + below(3));
            Stored a(format, type, rows, cols, by_block, wild, transposed),
                b(format, type, rows, cols, by_block, wild, transposed);
            for (const bool along_columns : {false, true}) {
                const int64_t depth = along_columns ? rows : cols, width = along_columns ? cols : rows;
                const int64_t slices = pieces(depth, kSlice);
                for (int64_t at = 0; at < width; at += 2 * kLanes) {
                    const Source one{{make_part(a.m, along_columns, at, 0, 2, 0), Part()}, 1};
                    panel(one, slices, name);
                    if (along_columns) {
                        const Source two{
                            {make_part(a.m, true, at, 0, 2, 0), make_part(b.m, true, at, 0, 2, slices)}, 2};
                        panel(two, 2 * slices, name);
                    } else {
                        const Source two{
                            {make_part(a.m, false, at, 0, 1, 0), make_part(b.m, false, at, 1, 1, 0)}, 2};
                        panel(two, slices, name);
                    }
                }
            }
        }
    }
};

}  // namespace

int test() {
    Test test;
    const ScaleType none = ScaleType::none;
    struct Kind {
        Format format;
        std::vector<ScaleType> types;
    };
    const std::vector<ScaleType> real{ScaleType::f32, ScaleType::bf16, ScaleType::f16};
    const std::vector<Kind> kinds{
        {Format::f32, {none}},
        {Format::bf16, {none}},
        {Format::fp8, {ScaleType::f32, ScaleType::bf16, ScaleType::f16, ScaleType::ue8m0}},
        {Format::mxfp4, {ScaleType::ue8m0}},
        {Format::nvfp4, real},
        {Format::int8, real},
        {Format::int4, real},
        {Format::uint4, real},
        {Format::q8_0, {none}},
        {Format::q4_0, {none}},
        {Format::q5_0, {none}},
        {Format::q5_1, {none}},
        {Format::q4_k, {none}},
        {Format::q5_k, {none}},
        {Format::q6_k, {none}}};
#define KT_NAME(name) #name,
    const char* const names[] = {KT_FORMATS(KT_NAME)};
#undef KT_NAME
    for (const Kind& kind : kinds)
        for (const ScaleType type : kind.types)
            test.format(kind.format, type, names[static_cast<int>(kind.format)]);
    printf("%lld panels, %lld differ\n", static_cast<long long>(test.done),
           static_cast<long long>(test.failed));
    return test.failed == 0 ? 0 : 1;
}

}  // namespace kt::KT_ISA

int main() { return kt::KT_ISA::test(); }
