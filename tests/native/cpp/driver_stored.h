// Random experts' matrices in every format, and what their bytes mean: written from the formats'
// definitions, element by element, without the engine's decoders.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "matrix.h"

namespace driver {

// splitmix64.
class Random {
  public:
    explicit Random(uint64_t seed) : state_(seed) {}
    uint64_t bits() {
        uint64_t z = state_ += 0x9E3779B97F4A7C15u;
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
        z = (z ^ z >> 27) * 0x94D049BB133111EBu;
        return z ^ z >> 31;
    }
    int64_t below(int64_t n) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(n)); }
    double unit() { return static_cast<double>(bits() >> 11) * 0x1p-53; }
    // Uniform with mean 0 and variance 1.
    float value() { return static_cast<float>((2 * unit() - 1) * 1.7320508); }

  private:
    uint64_t state_;
};

// Bytes that end where their heap block ends, `shift` bytes into it: AddressSanitizer sees every read past
// the end.
class Bytes {
  public:
    Bytes() : Bytes(0, 0) {}
    Bytes(int64_t size, int64_t shift) : block_(new uint8_t[size + shift]()), size_(size), shift_(shift) {}
    uint8_t* at(int64_t offset = 0) const { return block_.get() + shift_ + offset; }
    int64_t size() const { return size_; }
    uint64_t hash() const {
        uint64_t h = 0xcbf29ce484222325u;
        for (int64_t i = 0; i < size_ + shift_; ++i) h = (h ^ block_[i]) * 0x100000001b3u;
        return h;
    }

  private:
    std::unique_ptr<uint8_t[]> block_;
    int64_t size_, shift_;
};

inline uint16_t bf16_of(float v) {
    uint32_t u;
    std::memcpy(&u, &v, 4);
    return static_cast<uint16_t>((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}
inline float of_bf16(uint16_t v) {
    const uint32_t u = static_cast<uint32_t>(v) << 16;
    float f;
    std::memcpy(&f, &u, 4);
    return f;
}
inline float of_half(uint16_t h) {
    const int exponent = h >> 10 & 31, mantissa = h & 1023;
    const double size =
        exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
    return static_cast<float>(h >> 15 ? -size : size);
}
// Truncated.
inline uint16_t half_of(double v) {
    int exponent;
    const double m = std::frexp(std::fabs(v), &exponent);
    const int size = exponent < -13 ? static_cast<int>(std::ldexp(std::fabs(v), 24))
                                    : (exponent + 14) << 10 | (static_cast<int>(m * 2048) & 1023);
    return static_cast<uint16_t>((v < 0 ? 0x8000 : 0) | size);
}
inline float of_fp8(uint8_t v) {
    const int exponent = v >> 3 & 15, mantissa = v & 7;
    const double size = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
    return static_cast<float>(v >> 7 ? -size : size);
}
inline float e2m1(int code) {
    static constexpr float kValues[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    return code < 8 ? kValues[code] : -kValues[code - 8];
}
inline uint16_t half_at(const uint8_t* p) { return static_cast<uint16_t>(p[0] | p[1] << 8); }

// A format with the sizes and type of its scales; block_rows or block_cols 0: all.
struct Variant {
    const char* name;
    kt::Format format;
    int64_t multiple;  // of the sizes
    int64_t block_rows, block_cols;
    kt::ScaleType scale;
    int64_t elements, bytes;  // of the smallest unit along a row
    double size;              // root mean square of the codes' values at scale 1
};

constexpr Variant kVariants[] = {
    {"f32", kt::Format::f32, 1, 1, 0, kt::ScaleType::none, 1, 4, 1},
    {"bf16", kt::Format::bf16, 1, 1, 0, kt::ScaleType::none, 1, 2, 1},
    {"fp8-128x128", kt::Format::fp8, 1, 128, 128, kt::ScaleType::f32, 1, 1, 118},
    {"fp8-128x128-ue8m0", kt::Format::fp8, 1, 128, 128, kt::ScaleType::ue8m0, 1, 1, 118},
    {"fp8-channel", kt::Format::fp8, 1, 1, 0, kt::ScaleType::bf16, 1, 1, 118},
    {"fp8-3x32", kt::Format::fp8, 1, 3, 32, kt::ScaleType::f16, 1, 1, 118},
    {"mxfp4", kt::Format::mxfp4, 32, 1, 32, kt::ScaleType::ue8m0, 32, 16, 2.9},
    {"int8-channel", kt::Format::int8, 1, 1, 0, kt::ScaleType::f32, 1, 1, 74},
    {"int8-32", kt::Format::int8, 32, 1, 32, kt::ScaleType::f16, 1, 1, 74},
    {"int8-128", kt::Format::int8, 128, 1, 128, kt::ScaleType::bf16, 1, 1, 74},
    {"int4-channel", kt::Format::int4, 32, 1, 0, kt::ScaleType::f32, 32, 16, 4.6},
    {"int4-32", kt::Format::int4, 32, 1, 32, kt::ScaleType::bf16, 32, 16, 4.6},
    {"int4-128", kt::Format::int4, 128, 1, 128, kt::ScaleType::f16, 32, 16, 4.6},
    {"q8_0", kt::Format::q8_0, 32, 1, 0, kt::ScaleType::none, 32, 34, 74},
    {"q4_0", kt::Format::q4_0, 32, 1, 0, kt::ScaleType::none, 32, 18, 4.6},
    {"q5_0", kt::Format::q5_0, 32, 1, 0, kt::ScaleType::none, 32, 22, 9.2},
    {"q5_1", kt::Format::q5_1, 32, 1, 0, kt::ScaleType::none, 32, 24, 9.2},
    {"q4_k", kt::Format::q4_k, 256, 1, 0, kt::ScaleType::none, 256, 144, 220},
    {"q5_k", kt::Format::q5_k, 256, 1, 0, kt::ScaleType::none, 256, 176, 450},
    {"q6_k", kt::Format::q6_k, 256, 1, 0, kt::ScaleType::none, 256, 210, 1370},
    {"nvfp4", kt::Format::nvfp4, 32, 0, 0, kt::ScaleType::f32, 32, 18, 342},
    {"uint4-32", kt::Format::uint4, 32, 1, 32, kt::ScaleType::f16, 32, 16, 6.5},
    {"uint4-128", kt::Format::uint4, 128, 1, 128, kt::ScaleType::bf16, 32, 16, 6.5},
};
constexpr int64_t kNumVariants = sizeof(kVariants) / sizeof(kVariants[0]);

// How a matrix lies in memory.
struct Layout {
    bool transposed;  // f32 and bf16 only
    int64_t step;     // f32 and bf16 only: elements apart
    int64_t pad;      // units between rows
    int64_t shift;    // bytes by which formats of single bytes are off their alignment
};

// Element k of a row of GGUF blocks, as ggml defines the type.
inline float gguf_value(kt::Format format, const uint8_t* block, int64_t j) {
    const float d = of_half(half_at(block));
    switch (format) {
        case kt::Format::q8_0:
            return static_cast<float>(static_cast<int8_t>(block[2 + j])) * d;
        case kt::Format::q4_0:
            return d * static_cast<float>((block[2 + j % 16] >> (j / 16 * 4) & 15) - 8);
        case kt::Format::q5_0:
        case kt::Format::q5_1: {
            const int64_t at = format == kt::Format::q5_0 ? 2 : 4;
            const int high = block[at + j / 8] >> (j % 8) & 1;
            const int code = (block[at + 4 + j % 16] >> (j / 16 * 4) & 15) | high << 4;
            if (format == kt::Format::q5_0) return d * static_cast<float>(code - 16);
            return d * static_cast<float>(code) + of_half(half_at(block + 2));
        }
        case kt::Format::q4_k:
        case kt::Format::q5_k: {
            const int64_t sub = j / 32;
            const uint8_t* s = block + 4;
            const int scale = sub < 4 ? s[sub] & 63 : (s[sub + 4] & 15) | (s[sub - 4] >> 6) << 4;
            const int low = sub < 4 ? s[sub + 4] & 63 : s[sub + 4] >> 4 | (s[sub] >> 6) << 4;
            const uint8_t* codes = block + (format == kt::Format::q5_k ? 48 : 16);
            int code = codes[sub / 2 * 32 + j % 32] >> (sub % 2 * 4) & 15;
            if (format == kt::Format::q5_k) code |= (block[16 + j % 32] >> sub & 1) << 4;
            const float min = of_half(half_at(block + 2)) * static_cast<float>(low);
            return d * static_cast<float>(scale) * static_cast<float>(code) - min;
        }
        default: {  // q6_k
            const int64_t half = j / 128, s = j % 128 / 32, i = j % 32;
            const int low = block[half * 64 + s % 2 * 32 + i] >> (s / 2 * 4) & 15;
            const int high = block[128 + half * 32 + i] >> (2 * s) & 3;
            const int scale = static_cast<int8_t>(block[192 + j / 16]);
            return of_half(half_at(block + 208)) * static_cast<float>(scale) *
                   static_cast<float>((low | high << 4) - 32);
        }
    }
}

// One projection of all experts: bytes, the engine's view of them, and their values [E, N, K].
struct Stored {
    Bytes data, scales;
    kt::ExpertMatrices view{};
    std::vector<float> values;
};

class StoredMaker {
  public:
    StoredMaker(const Variant& v, int64_t e, int64_t n, int64_t k, const Layout& layout, Random& random)
        : v_(v), e_(e), n_(n), k_(k), random_(random), unit_(1 / (v.size * std::sqrt(double(k)))) {
        kt::Matrix& m = out_.view.first;
        m.format = v.format;
        m.scale_type = v.scale;
        m.rows = n;
        m.cols = k;
        m.block_rows = v.block_rows == 0 ? n : v.block_rows;
        m.block_cols = v.block_cols == 0 ? k : v.block_cols;
        plain_ = v.format == kt::Format::f32 || v.format == kt::Format::bf16;
        place_data(layout);
        if (v.scale != kt::ScaleType::none) place_scales(layout);
        out_.values.resize(e * n * k);
        for (int64_t x = 0; x < e; ++x)
            for (int64_t row = 0; row < n; ++row) fill_row(out_.view.at(x), x, row);
    }
    Stored take() { return std::move(out_); }

  private:
    void place_data(const Layout& layout) {
        kt::Matrix& m = out_.view.first;
        const int64_t unit = v_.bytes, units = k_ / v_.elements;
        int64_t last;
        if (plain_) {
            const int64_t inner = layout.step * unit;
            const int64_t outer = ((layout.transposed ? n_ : k_) * layout.step + layout.pad) * unit;
            m.row_bytes = layout.transposed ? inner : outer;
            m.col_bytes = layout.transposed ? outer : inner;
            last = (n_ - 1) * m.row_bytes + (k_ - 1) * m.col_bytes + unit;
        } else {
            m.row_bytes = (units + layout.pad) * unit;
            last = (n_ - 1) * m.row_bytes + units * unit;
        }
        out_.view.expert_bytes = (last + unit - 1) / unit * unit + layout.pad * unit;
        const bool single = !plain_ && v_.format != kt::Format::int4 && v_.format != kt::Format::uint4;
        out_.data = Bytes(e_ == 0 ? 0 : (e_ - 1) * out_.view.expert_bytes + last, single ? layout.shift : 0);
        m.data = out_.data.at();
        for (int64_t i = 0; i < out_.data.size(); ++i)
            *out_.data.at(i) = static_cast<uint8_t>(random_.bits());
    }

    void place_scales(const Layout& layout) {
        kt::Matrix& m = out_.view.first;
        const int64_t size = scale_bytes(), rows = (n_ + m.block_rows - 1) / m.block_rows;
        const int64_t groups = (k_ + m.block_cols - 1) / m.block_cols;
        const int64_t cols = v_.format == kt::Format::uint4 ? 2 * groups : groups;
        m.scale_row_bytes = (cols + layout.pad) * size;
        const int64_t used = (rows - 1) * m.scale_row_bytes + cols * size;
        out_.view.scale_expert_bytes = used + layout.pad * size;
        out_.scales = Bytes(e_ == 0 ? 0 : (e_ - 1) * out_.view.scale_expert_bytes + used, 0);
        m.scales = out_.scales.at();
        for (int64_t i = 0; i + size <= out_.scales.size(); i += size) write_scale(out_.scales.at(i));
        if (cols > groups)
            for (int64_t row = 0; row < e_ * rows; ++row)
                for (int64_t group = groups; group < cols; ++group)
                    write_number(out_.scales.at(row / rows * out_.view.scale_expert_bytes +
                                                row % rows * m.scale_row_bytes + group * size),
                                 static_cast<float>(random_.below(16)));
    }

    int64_t scale_bytes() const {
        return v_.scale == kt::ScaleType::f32 ? 4 : v_.scale == kt::ScaleType::ue8m0 ? 1 : 2;
    }

    double factor() { return random_.below(64) == 0 ? 0 : unit_ * (0.5 + random_.unit()); }

    void write_scale(uint8_t* to) {
        write_number(to, static_cast<float>(factor()));
        if (scale_bytes() == 1)
            *to = static_cast<uint8_t>(126 + std::lround(std::log2(unit_)) + random_.below(3));
    }

    void write_number(uint8_t* to, float v) const {
        const uint16_t half = v_.scale == kt::ScaleType::f16 ? half_of(v) : bf16_of(v);
        if (v_.scale == kt::ScaleType::f32) std::memcpy(to, &v, 4);
        if (scale_bytes() == 2) std::memcpy(to, &half, 2);
    }

    // `after`: so many scales further.
    float scale_of(const kt::Matrix& m, int64_t row, int64_t k, int64_t after = 0) const {
        const uint8_t* p =
            m.scales + row / m.block_rows * m.scale_row_bytes + (k / m.block_cols + after) * scale_bytes();
        if (v_.scale == kt::ScaleType::ue8m0) return static_cast<float>(std::ldexp(1.0, *p - 127));
        float v;
        if (v_.scale == kt::ScaleType::f32)
            std::memcpy(&v, p, 4);
        else
            v = v_.scale == kt::ScaleType::bf16 ? of_bf16(half_at(p)) : of_half(half_at(p));
        return v;
    }

    // Replaces what random bytes must not be, and notes the values.
    void fill_row(const kt::Matrix& m, int64_t expert, int64_t row) {
        float* values = out_.values.data() + (expert * n_ + row) * k_;
        for (int64_t k = 0; k < k_; ++k) {
            uint8_t* at = const_cast<uint8_t*>(m.data) + row * m.row_bytes + k / v_.elements * v_.bytes;
            if (plain_) {
                at = const_cast<uint8_t*>(m.data) + row * m.row_bytes + k * m.col_bytes;
                const float v = static_cast<float>(random_.value() * unit_);
                const uint16_t half = bf16_of(v);
                std::memcpy(at, v_.bytes == 4 ? static_cast<const void*>(&v) : &half, v_.bytes);
                values[k] = v_.bytes == 4 ? v : of_bf16(half);
            } else if (v_.format == kt::Format::fp8) {
                if ((*at & 127) == 127) *at = 0;  // NaN
                values[k] = of_fp8(*at) * scale_of(m, row, k);
            } else if (v_.format == kt::Format::int8) {
                values[k] = static_cast<float>(static_cast<int8_t>(*at)) * scale_of(m, row, k);
            } else if (v_.format == kt::Format::mxfp4 || v_.format == kt::Format::int4) {
                const int code = at[k % 32 / 2] >> (k % 2 * 4) & 15;
                const float v = v_.format == kt::Format::int4 ? static_cast<float>(code - 8) : e2m1(code);
                values[k] = v * scale_of(m, row, k);
            } else if (v_.format == kt::Format::uint4) {
                const int code = at[k % 32 / 2] >> (k % 2 * 4) & 15;
                const float zero = scale_of(m, row, k, k_ / m.block_cols);
                values[k] = scale_of(m, row, k) * (static_cast<float>(code) - zero);
            } else if (v_.format == kt::Format::nvfp4) {
                uint8_t* own = at + k % 32 / 16;
                if ((*own & 127) == 127) *own = 0;  // NaN
                const float scale = of_fp8(*own) * scale_of(m, row, k);
                values[k] = scale * e2m1(at[2 + k % 32 / 2] >> (k % 2 * 4) & 15);
            } else {
                if (k % v_.elements == 0) write_factors(at);
                values[k] = gguf_value(v_.format, at, k % v_.elements);
            }
        }
    }

    // The halves in a GGUF block. Formats of unsigned codes have a minimum that centres them.
    void write_factors(uint8_t* block) {
        const double d = factor();
        const uint16_t scale = half_of(d);
        std::memcpy(block + (v_.format == kt::Format::q6_k ? 208 : 0), &scale, 2);
        const double centre = v_.format == kt::Format::q5_1   ? -15.5
                              : v_.format == kt::Format::q4_k ? 7.5
                              : v_.format == kt::Format::q5_k ? 15.5
                                                              : 0;
        const uint16_t min = half_of(d * centre);
        if (centre != 0) std::memcpy(block + 2, &min, 2);
    }

    const Variant& v_;
    const int64_t e_, n_, k_;
    Random& random_;
    const double unit_;
    bool plain_;
    Stored out_;
};

}  // namespace driver
