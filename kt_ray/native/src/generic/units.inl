// Units of float panels on vectors: what decode_unit (generic/panels.inl) makes, where a unit is complete.
//
// Along rows the stored bytes are transposed, dword by dword, by the instruction set's transpose_rows: 2, 4
// or 8 elements of every row, that only need to be cut out and multiplied by the scales of their rows. Along
// columns a row of the matrix is a step of the panel. Values are those of generic/formats.inl, bit for bit:
// integers and E4M3 become floats exactly, then the scale multiplies once.

using Bits = uint32_t __attribute__((vector_size(kLanes * 4)));

inline Vec as_floats(Bits v) { return __builtin_bit_cast(Vec, v); }
inline Bits all_bits(uint32_t v) { return Bits{} + v; }

// Scales of strips at depth k of kLanes rows from n on.
inline Vec row_scales(const Matrix& m, int64_t n, int64_t k) {
    const uint32_t column =
        k < m.block_cols ? 0 : static_cast<uint32_t>(k) / static_cast<uint32_t>(m.block_cols);
    const uint8_t* from = m.scales + column * scale_size(m.scale_type);
    const uint32_t rows = static_cast<uint32_t>(m.block_rows), first = static_cast<uint32_t>(n) / rows;
    if (rows > 1 && n - first * rows + kLanes <= rows)
        return vset1(scale_value(m.scale_type, from + first * m.scale_row_bytes));
    alignas(64) float scales[kLanes];
    const auto fill = [&](auto value) {
        for (int64_t i = 0; i < kLanes; ++i) {
            const int64_t row = rows == 1 ? n + i : static_cast<uint32_t>(n + i) / rows;
            scales[i] = value(from + row * m.scale_row_bytes);
        }
    };
    switch (m.scale_type) {
        case ScaleType::f32:
            fill([](const uint8_t* p) { return load_as<float>(p); });
            break;
        case ScaleType::bf16:
            fill([](const uint8_t* p) { return to_float(load_as<Bf16>(p)); });
            break;
        default:
            fill([&](const uint8_t* p) { return scale_value(m.scale_type, p); });
    }
    return vload(scales);
}

// Unsigned integers below 2^23, less kBias.
template <int kBias>
inline Vec unbiased(Bits v) {
    return as_floats(v | 0x4b000000u) - (8388608.0f + kBias);
}

// E4M3 without sign in bits 20 to 26. Subnormal numbers, taken for normal ones, come out as f below 2^-6
// where 2 f - 2^-6 is meant; for all others that is not below f. No NaN: what has one goes another way.
inline Vec fp8_magnitude(Bits v) {
    const Vec f = as_floats((v & 0x07f00000u) + (120u << 23));
    return vmin(f, vfma(f, vset1(2.0f), vset1(-0x1p-6f)));
}
inline bool has_fp8_nan(Bits v) { return any_bit(((v & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u); }

// A format's elements: `kChunks` of 16 bytes of a strip from `at(m, n, k)` on; `each` calls put(depth,
// values) for the elements in dword d of chunk c of kLanes rows. `row` are the kLanes elements at (n, k). A
// format without a specialisation is decoded by way of its strips.
template <Format F>
struct Units {
    static constexpr bool kThere = false;
};

template <>
struct Units<Format::bf16> {
    static constexpr bool kThere = true;
    static constexpr int kBytes = 64;
    static Vec scales(const Matrix&, int64_t, int64_t) { return vset1(1.0f); }
    template <class Put>
    static void each(int d, Bits v, Vec, const Put& put) {
        put(2 * d, as_floats(v << 16));
        put(2 * d + 1, as_floats(v & 0xffff0000u));
    }
    static Vec row(const uint8_t* from, float) { return vload(reinterpret_cast<const Bf16*>(from)); }
};

template <>
struct Units<Format::int8> {
    static constexpr bool kThere = true;
    static constexpr int kBytes = 32;
    static Vec scales(const Matrix& m, int64_t n, int64_t k) { return row_scales(m, n, k); }
    template <class Put>
    static void each(int d, Bits v, Vec scales, const Put& put) {
        v ^= 0x80808080u;
        for (int j = 0; j < 4; ++j) put(4 * d + j, unbiased<128>(v >> (8 * j) & 0xffu) * scales);
    }
    static Vec row(const uint8_t* from, float scale) {
        return unbiased<128>(load_bytes(from) ^ 0x80u) * scale;
    }
};

template <>
struct Units<Format::fp8> {
    static constexpr bool kThere = true;
    static constexpr int kBytes = 32;
    static Vec scales(const Matrix& m, int64_t n, int64_t k) { return row_scales(m, n, k); }
    template <class Put>
    static void each(int d, Bits v, Vec scales, const Put& put) {
        for (int j = 0; j < 4; ++j) {
            const Vec f = fp8_magnitude(j < 3 ? v << (20 - 8 * j) : v >> 4);
            put(4 * d + j,
                as_floats(__builtin_bit_cast(Bits, f) | (v << (24 - 8 * j) & 0x80000000u)) * scales);
        }
    }
    static Vec row(const uint8_t* from, float scale) {
        const Bits v = load_bytes(from);
        return as_floats(__builtin_bit_cast(Bits, fp8_magnitude(v << 20)) | (v << 24 & 0x80000000u)) * scale;
    }
};

// The nibble in bits 0 to 3 of each lane; what is above does not matter.
inline Vec int4_values(Bits v) { return unbiased<8>(v & 15u); }

template <Format F>
struct NibbleUnits {
    static constexpr bool kThere = true;
    static constexpr int kBytes = 16;
    static Vec scales(const Matrix& m, int64_t n, int64_t k) { return row_scales(m, n, k); }
    static Vec values(Bits v) {
        if constexpr (F == Format::int4)
            return int4_values(v);
        else
            return fp4_values(v);
    }
    template <class Put>
    static void each(int d, Bits v, Vec scales, const Put& put) {
        for (int j = 0; j < 8; ++j) put(8 * d + j, values(v >> (4 * j)) * scales);
    }
    static Vec row(const uint8_t* from, float scale) { return values(load_nibbles(from)) * scale; }
};
template <>
struct Units<Format::int4> : NibbleUnits<Format::int4> {};
template <>
struct Units<Format::mxfp4> : NibbleUnits<Format::mxfp4> {};

// kLanes rows from n on, a strip at depth k each; `to` is the half of a slice. False: not done.
template <Format F>
bool place_strips(const Matrix& m, int64_t n, int64_t k, float* to) {
    using U = Units<F>;
    const uint8_t* from = block_at<F>(m, n, k);
    const Vec scales = U::scales(m, n, k);
    Bits bad{};
    transpose_rows<U::kBytes>(from, m.row_bytes, [&](int d, Bits v) __attribute__((always_inline)) {
        if constexpr (F == Format::fp8) bad |= (v & 0x7f7f7f7fu) + 0x01010101u;
        U::each(d, v, scales, [&](int depth, Vec value) __attribute__((always_inline)) {
            vstore(to + depth * 2 * kLanes, value);
        });
    });
    return F != Format::fp8 || !any_bit(bad & 0x80808080u);
}

// kUnitDepth rows from n on, 2 * kLanes columns from k on.
template <Format F>
bool place_columns(const Matrix& m, int64_t n, int64_t k, float* to) {
    using U = Units<F>;
    constexpr int64_t kBytes = kLanes * block_bytes<F>() / block_elements<F>();
    const uint8_t* from =
        block_at<F>(m, n, k) + k % block_elements<F>() * block_bytes<F>() / block_elements<F>();
    Bits bad{};
    float scale = F == Format::bf16 ? 1.0f : strip_scale(m, n, k);
    for (int64_t q = 0; q < kUnitDepth; ++q, from += m.row_bytes, to += 2 * kLanes) {
        if (F != Format::bf16 && m.block_rows == 1) scale = strip_scale(m, n + q, k);
        vstore(to, U::row(from, scale));
        vstore(to + kLanes, U::row(from + kBytes, scale));
        if constexpr (F == Format::fp8)
            for (int64_t i = 0; i < 2; ++i) bad |= (load_bytes(from + i * kBytes) & 0x7fu) + 1u;
    }
    return F != Format::fp8 || !any_bit(bad & 0x80u);
}
