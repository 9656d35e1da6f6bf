// Weight formats, in plain C++: a strip of up to 32 elements of a row becomes the float32 values that
// the format's reference dequantisation gives, in its order of operations. Included after scalar.inl.
//
// Loops run over whole strips where the format allows no other, without table look-ups, so that the
// compiler vectorises them.

constexpr int64_t kStrip = 32;

// Of a format: kElements and kBytes, those of the smallest unit along a row (for GGUF, its blocks), and
// strip(m, n, k, count, to), the float32 values of W[n][k .. k + count): k a multiple of 32, 1 <= count <=
// 32, k + count <= cols. A new format is such a struct, below, and a name in KT_FORMATS (and in
// native/matrix.py, for Python).
template <Format F>
struct FormatTraits;

// The block that holds element k of row n.
template <Format F>
inline const uint8_t* block_at(const Matrix& m, int64_t n, int64_t k) {
    using Traits = FormatTraits<F>;
    constexpr uint64_t elements = Traits::kElements;
    return m.data + n * m.row_bytes +
           static_cast<int64_t>(static_cast<uint64_t>(k) / elements) * Traits::kBytes;
}

template <class T>
inline T load_as(const uint8_t* p) {
    T v;
    __builtin_memcpy(&v, p, sizeof(T));
    return v;
}

inline float half_to_float(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, magnitude = h & 0x7fffu;
    const uint32_t normal = (magnitude << 13) + (112u << 23);
    const uint32_t small = float_bits(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
    const uint32_t special = magnitude << 13 | 0x7f800000u;
    return bits_float(sign | (magnitude < 0x400u ? small : magnitude < 0x7c00u ? normal : special));
}

// 2^(e - 127), subnormal for 0; 255 is a NaN.
inline float ue8m0_to_float(uint8_t e) {
    const bool end = static_cast<uint8_t>(e + 1) < 2;
    return bits_float(static_cast<uint32_t>(e) << 23 | (end ? 0x00400000u : 0u));
}

inline float fp8_to_float(uint8_t v) {
    const uint32_t magnitude = v & 0x7fu, sign = static_cast<uint32_t>(v & 0x80u) << 24;
    const uint32_t normal = (magnitude << 20) + (120u << 23);
    const uint32_t small = float_bits(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-9f);
    const uint32_t finite = magnitude < 8 ? small : normal;
    return bits_float(sign | (magnitude == 0x7fu ? 0x7fc00000u : finite));
}

// E4M3's values, for what looks single ones up: the 128 magnitudes first.
struct Fp8Table {
    alignas(64) float of[256];

    constexpr Fp8Table() : of() {
        for (uint32_t v = 0; v < 128; ++v) {
            of[v] =
                v < 8 ? static_cast<float>(v) * 0x1p-9f : __builtin_bit_cast(float, (v << 20) + (120u << 23));
            if (v == 127) of[v] = __builtin_nanf("");
            of[128 + v] = -of[v];
        }
    }
};
constexpr Fp8Table kFp8;

inline float fp4_to_float(uint32_t nibble) {
    const uint32_t magnitude = nibble & 7u, sign = (nibble & 8u) << 28;
    const uint32_t normal = (magnitude << 22) + (126u << 23);
    const uint32_t small = magnitude * 0x3f000000u;  // 0 or 0.5
    return bits_float(sign | (magnitude < 2 ? small : normal));
}

inline int64_t scale_size(ScaleType type) {
    return type == ScaleType::f32 ? 4 : type == ScaleType::ue8m0 ? 1 : 2;
}

inline float scale_value(ScaleType type, const uint8_t* p) {
    switch (type) {
        case ScaleType::f32:
            return load_as<float>(p);
        case ScaleType::ue8m0:
            return ue8m0_to_float(*p);
        case ScaleType::bf16:
            return to_float(load_as<Bf16>(p));
        case ScaleType::f16:
            return half_to_float(load_as<uint16_t>(p));
        case ScaleType::none:
            break;
    }
    return 1.0f;
}

// The scale of the strip at (n, k). 32-bit divisions: several times faster, and sizes are far below 2^32.
inline float strip_scale(const Matrix& m, int64_t n, int64_t k) {
    const uint32_t row = static_cast<uint32_t>(n) / static_cast<uint32_t>(m.block_rows);
    const uint32_t col =
        k < m.block_cols ? 0 : static_cast<uint32_t>(k) / static_cast<uint32_t>(m.block_cols);
    return scale_value(m.scale_type, m.scales + row * m.scale_row_bytes + col * scale_size(m.scale_type));
}

// Of uint4: where the zero point of a strip lies behind its scale.
inline int64_t zero_distance(const Matrix& m) {
    const uint32_t groups =
        m.block_cols < m.cols ? static_cast<uint32_t>(m.cols) / static_cast<uint32_t>(m.block_cols) : 1;
    return groups * scale_size(m.scale_type);
}
inline Matrix zeros_as_scales(Matrix m) {
    m.scales += zero_distance(m);
    return m;
}
inline float strip_zero(const Matrix& m, int64_t n, int64_t k) {
    return strip_scale(zeros_as_scales(m), n, k);
}

// Scales of the strips at column k of `count` rows from n on.
inline void column_scales(const Matrix& m, int64_t n, int64_t k, int64_t count, float* to) {
    const int64_t column =
        k < m.block_cols ? 0 : static_cast<uint32_t>(k) / static_cast<uint32_t>(m.block_cols);
    const uint8_t* from = m.scales + column * scale_size(m.scale_type);
    if (m.block_rows > 1) {
        const uint32_t rows = static_cast<uint32_t>(m.block_rows);
        for (int64_t i = 0; i < count;) {
            const int64_t block = static_cast<uint32_t>(n + i) / rows;
            const float scale = scale_value(m.scale_type, from + block * m.scale_row_bytes);
            for (const int64_t end = min_of(count, (block + 1) * rows - n); i < end; ++i) to[i] = scale;
        }
        return;
    }
    from += n * m.scale_row_bytes;
    const auto fill = [&](auto value) {
        for (int64_t i = 0; i < count; ++i, from += m.scale_row_bytes) to[i] = value(from);
    };
    switch (m.scale_type) {
        case ScaleType::f32:
            return fill([](const uint8_t* p) { return load_as<float>(p); });
        case ScaleType::bf16:
            return fill([](const uint8_t* p) { return to_float(load_as<Bf16>(p)); });
        default:
            return fill([&](const uint8_t* p) { return scale_value(m.scale_type, p); });
    }
}

// Scale (low half) and minimum (high half) of sub-block j of a Q4_K or Q5_K block: 6 bits each, packed in
// the 12 bytes p.
inline uint32_t k_scale_min_bits(const uint8_t* p, int64_t j) {
    const uint8_t* q = p + (j & 3);
    const uint32_t both = static_cast<uint32_t>(q[0]) | static_cast<uint32_t>(q[4]) << 16;
    if (j < 4) return both & 0x003f003fu;
    const uint32_t low = static_cast<uint32_t>(q[8]);
    return (low & 15u) | (low >> 4) << 16 | (both >> 2 & 0x00300030u);
}

// A strip's integers, one per byte, put together eight at a time.
struct Codes {
    uint8_t of[kStrip];

    void set(int64_t eight, uint64_t bytes) { __builtin_memcpy(of + 8 * eight, &bytes, 8); }
};

constexpr uint64_t kEach = 0x0101010101010101u;  // times a byte: it in all eight

// Eight nibbles, low first.
inline uint64_t spread_nibbles(uint32_t nibbles) {
    uint64_t v = nibbles;
    v = (v | v << 16) & 0x0000ffff0000ffffu;
    v = (v | v << 8) & 0x00ff00ff00ff00ffu;
    return (v | v << 4) & 15 * kEach;
}

// Loops over a whole strip are apart, so that they have a constant length.
template <class T>
struct PlainTraits {
    static constexpr int64_t kElements = 1, kBytes = sizeof(T);

    static void strip(const Matrix& m, int64_t n, int64_t k, int64_t count, float* to) {
        const uint8_t* from = m.data + n * m.row_bytes + k * m.col_bytes;
        if (m.col_bytes == kBytes && count == kStrip) return widen(from, kBytes, kStrip, to);
        widen(from, m.col_bytes, count, to);
    }
    static void widen(const uint8_t* from, int64_t step, int64_t count, float* __restrict to) {
        for (int64_t j = 0; j < count; ++j) to[j] = to_float(load_as<T>(from + j * step));
    }
};
template <>
struct FormatTraits<Format::f32> : PlainTraits<float> {};
template <>
struct FormatTraits<Format::bf16> : PlainTraits<Bf16> {};

template <Format F>
struct ScaledByteTraits {
    static constexpr int64_t kElements = 1, kBytes = 1;

    static void strip(const Matrix& m, int64_t n, int64_t k, int64_t count, float* to) {
        const uint8_t* from = block_at<F>(m, n, k);
        const float scale = strip_scale(m, n, k);
        if (count == kStrip) return scaled(from, scale, kStrip, to);
        scaled(from, scale, count, to);
    }
    static void scaled(const uint8_t* from, float scale, int64_t count, float* __restrict to) {
        for (int64_t j = 0; j < count; ++j) {
            const float v =
                F == Format::fp8 ? fp8_to_float(from[j]) : static_cast<float>(static_cast<int8_t>(from[j]));
            to[j] = v * scale;
        }
    }
};
template <>
struct FormatTraits<Format::fp8> : ScaledByteTraits<Format::fp8> {};
template <>
struct FormatTraits<Format::int8> : ScaledByteTraits<Format::int8> {};

// A format whose strips are whole: FormatTraits<F>::whole(m, n, k, block, to) writes to[0 .. 32).
template <Format F>
struct WholeStrips {
    static void strip(const Matrix& m, int64_t n, int64_t k, int64_t count, float* to) {
        const uint8_t* block = block_at<F>(m, n, k);
        if (count == kStrip) return FormatTraits<F>::whole(m, n, k, block, to);
        float all[kStrip];
        FormatTraits<F>::whole(m, n, k, block, all);
        for (int64_t j = 0; j < count; ++j) to[j] = all[j];
    }
};

template <Format F>
struct NibbleTraits : WholeStrips<F> {
    static constexpr int64_t kElements = kStrip, kBytes = 16;

    static void whole(const Matrix& m, int64_t n, int64_t k, const uint8_t* block, float* __restrict to) {
        const float scale = strip_scale(m, n, k);
        Codes codes;
        for (int64_t j = 0; j < 4; ++j) codes.set(j, spread_nibbles(load_as<uint32_t>(block + 4 * j)));
        for (int64_t j = 0; j < kStrip; ++j) {
            const uint32_t v = codes.of[j];
            to[j] = scale *
                    (F == Format::mxfp4 ? fp4_to_float(v) : static_cast<float>(static_cast<int32_t>(v) - 8));
        }
    }
};
template <>
struct FormatTraits<Format::mxfp4> : NibbleTraits<Format::mxfp4> {};
template <>
struct FormatTraits<Format::int4> : NibbleTraits<Format::int4> {};

// Integers from 0 to 15 less a zero point.
template <>
struct FormatTraits<Format::uint4> : WholeStrips<Format::uint4> {
    static constexpr int64_t kElements = kStrip, kBytes = 16;

    static void whole(const Matrix& m, int64_t n, int64_t k, const uint8_t* block, float* __restrict to) {
        const float scale = strip_scale(m, n, k), zero = strip_zero(m, n, k);
        Codes codes;
        for (int64_t j = 0; j < 4; ++j) codes.set(j, spread_nibbles(load_as<uint32_t>(block + 4 * j)));
        for (int64_t j = 0; j < kStrip; ++j) to[j] = scale * (static_cast<float>(codes.of[j]) - zero);
    }
};

// E2M1 with a scale in E4M3 for 16 elements; those of a strip come before its nibbles. One scale more is of
// the whole matrix.
template <>
struct FormatTraits<Format::nvfp4> : WholeStrips<Format::nvfp4> {
    static constexpr int64_t kElements = kStrip, kBytes = 18;

    static void whole(const Matrix& m, int64_t n, int64_t k, const uint8_t* block, float* __restrict to) {
        const float all = strip_scale(m, n, k);
        const float scale[2] = {fp8_to_float(block[0]) * all, fp8_to_float(block[1]) * all};
        Codes codes;
        for (int64_t j = 0; j < 4; ++j) codes.set(j, spread_nibbles(load_as<uint32_t>(block + 2 + 4 * j)));
        for (int64_t j = 0; j < kStrip; ++j)
            to[j] = (j < 16 ? scale[0] : scale[1]) * fp4_to_float(codes.of[j]);
    }
};

template <>
struct FormatTraits<Format::q8_0> : WholeStrips<Format::q8_0> {
    static constexpr int64_t kElements = kStrip, kBytes = 34;

    static void whole(const Matrix&, int64_t, int64_t, const uint8_t* block, float* __restrict to) {
        const float d = half_to_float(load_as<uint16_t>(block));
        for (int64_t j = 0; j < kStrip; ++j)
            to[j] = static_cast<float>(static_cast<int8_t>(block[2 + j])) * d;
    }
};

template <>
struct FormatTraits<Format::q4_0> : WholeStrips<Format::q4_0> {
    static constexpr int64_t kElements = kStrip, kBytes = 18;

    static void whole(const Matrix&, int64_t, int64_t, const uint8_t* block, float* __restrict to) {
        const float d = half_to_float(load_as<uint16_t>(block));
        for (int64_t j = 0; j < 16; ++j) {
            to[j] = d * static_cast<float>((block[2 + j] & 15) - 8);
            to[16 + j] = d * static_cast<float>((block[2 + j] >> 4) - 8);
        }
    }
};

template <Format F>
struct FiveBitTraits : WholeStrips<F> {
    static constexpr bool kWithMin = F == Format::q5_1;
    static constexpr int64_t kElements = kStrip, kBytes = kWithMin ? 24 : 22;

    static void whole(const Matrix&, int64_t, int64_t, const uint8_t* block, float* __restrict to) {
        const float d = half_to_float(load_as<uint16_t>(block));
        const float min = kWithMin ? half_to_float(load_as<uint16_t>(block + 2)) : 0.0f;
        const uint8_t* q = block + (kWithMin ? 8 : 6);
        const uint32_t high = load_as<uint32_t>(q - 4);
        for (int64_t j = 0; j < 16; ++j) {
            const int32_t a = (q[j] & 15) | static_cast<int32_t>(high >> j & 1u) << 4;
            const int32_t b = (q[j] >> 4) | static_cast<int32_t>(high >> (16 + j) & 1u) << 4;
            to[j] = kWithMin ? d * static_cast<float>(a) + min : d * static_cast<float>(a - 16);
            to[16 + j] = kWithMin ? d * static_cast<float>(b) + min : d * static_cast<float>(b - 16);
        }
    }
};
template <>
struct FormatTraits<Format::q5_0> : FiveBitTraits<Format::q5_0> {};
template <>
struct FormatTraits<Format::q5_1> : FiveBitTraits<Format::q5_1> {};

template <Format F>
struct KTraits : WholeStrips<F> {
    static constexpr bool kFive = F == Format::q5_k;
    static constexpr int64_t kElements = 256, kBytes = kFive ? 176 : 144;

    static void whole(const Matrix&, int64_t, int64_t k, const uint8_t* block, float* __restrict to) {
        const int64_t sub = k % 256 / kStrip;
        const uint32_t s = k_scale_min_bits(block + 4, sub);
        const float d = half_to_float(load_as<uint16_t>(block)) * static_cast<float>(s & 0xffff);
        const float min = half_to_float(load_as<uint16_t>(block + 2)) * static_cast<float>(s >> 16);
        const uint8_t* high = block + 16;
        const uint8_t* low = block + (kFive ? 48 : 16) + sub / 2 * kStrip;
        Codes codes;
        for (int64_t j = 0; j < 4; ++j) {
            uint64_t v = load_as<uint64_t>(low + 8 * j) >> (sub % 2 * 4) & 15 * kEach;
            if constexpr (kFive) v |= (load_as<uint64_t>(high + 8 * j) >> sub & kEach) << 4;
            codes.set(j, v);
        }
        for (int64_t j = 0; j < kStrip; ++j) to[j] = d * static_cast<float>(codes.of[j]) - min;
    }
};
template <>
struct FormatTraits<Format::q4_k> : KTraits<Format::q4_k> {};
template <>
struct FormatTraits<Format::q5_k> : KTraits<Format::q5_k> {};

// Per 128 elements 64 bytes of low nibbles and 32 of high pairs; strip s of the four has its nibbles in half
// s % 2, shifted by 4 for s >= 2, and its pairs shifted by 2 s.
template <>
struct FormatTraits<Format::q6_k> : WholeStrips<Format::q6_k> {
    static constexpr int64_t kElements = 256, kBytes = 210;

    static void whole(const Matrix&, int64_t, int64_t k, const uint8_t* block, float* __restrict to) {
        const int64_t half = k % 256 / 128, s = k % 128 / kStrip;
        const uint8_t* low = block + half * 64 + s % 2 * kStrip;
        const uint8_t* high = block + 128 + half * 32;
        const uint8_t* scales = block + 192 + half * 8 + s * 2;
        const float d = half_to_float(load_as<uint16_t>(block + 208));
        Codes codes;
        for (int64_t j = 0; j < 4; ++j)
            codes.set(j, (load_as<uint64_t>(low + 8 * j) >> (s / 2 * 4) & 15 * kEach) |
                             (load_as<uint64_t>(high + 8 * j) >> (s * 2) & 3 * kEach) << 4);
        const float scale[2] = {d * static_cast<float>(static_cast<int8_t>(scales[0])),
                                d * static_cast<float>(static_cast<int8_t>(scales[1]))};
        for (int64_t j = 0; j < kStrip; ++j)
            to[j] = (j < 16 ? scale[0] : scale[1]) * static_cast<float>(codes.of[j] - 32);
    }
};

// Bytes of 8 strips: of one a fraction, for K-quants.
constexpr int64_t strip_bytes(Format format) {
#define KT_FORMAT(F) 8 * kStrip *FormatTraits<Format::F>::kBytes / FormatTraits<Format::F>::kElements,
    constexpr int64_t bytes[] = {KT_FORMATS(KT_FORMAT)};
#undef KT_FORMAT
    return bytes[static_cast<int>(format)];
}

template <Format F>
inline void strip(const Matrix& m, int64_t n, int64_t k, int64_t count, float* to) {
    FormatTraits<F>::strip(m, n, k, count, to);
}
