// Units of float panels on vectors: what decode_unit (generic/panels.inl) makes, where a unit is complete.
//
// Along rows the stored bytes are transposed, dword by dword, by the instruction set's transpose_rows: 2, 4
// or 8 elements of every row, that only need to be cut out and multiplied by the scales of their rows. Along
// columns a row of the matrix is a step of the panel. Values are those of generic/formats.inl, bit for bit:
// integers and E4M3 become floats exactly, then the scale multiplies once.

using Bits = uint32_t __attribute__((vector_size(kLanes * 4)));

inline Vec as_floats(Bits v) { return __builtin_bit_cast(Vec, v); }

// Unsigned integers below 2^23, less kBias.
template <int kBias>
inline Vec unbiased(Bits v) {
    return as_floats(v | 0x4b000000u) - (8388608.0f + kBias);
}

// A format's elements: `kChunks` of 16 bytes of a strip from `at(m, n, k)` on; `each` calls put(depth,
// values) for the elements in dword d of chunk c of kLanes rows. `row` are the kLanes elements at (n, k). A
// format without a specialisation is decoded by way of its strips.
template <Format F>
struct Units {
    static constexpr bool kThere = false;
};

template <>
struct Units<Format::f32> {
    static constexpr bool kThere = true;
    static constexpr int kBytes = 128;
    static constexpr bool kScaled = false;
    static constexpr float kScale = 1.0f;
    template <class Put>
    static void each(int d, Bits v, Vec, const Put& put) {
        put(d, as_floats(v));
    }
    static Vec row(const uint8_t* from, float) { return vload(reinterpret_cast<const float*>(from)); }
};

template <>
struct Units<Format::bf16> {
    static constexpr bool kThere = true;
    static constexpr int kBytes = 64;
    static constexpr bool kScaled = false;
    static constexpr float kScale = 1.0f;
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
    static constexpr bool kScaled = true;
    static constexpr float kScale = 1.0f;
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
    static constexpr bool kScaled = true;
    static constexpr float kScale = 256.0f;
    template <class Put>
    static void each(int d, Bits v, Vec scales, const Put& put) {
        fp8_values(v,
                   [&](int j, Vec value) __attribute__((always_inline)) { put(4 * d + j, value * scales); });
    }
    static Vec row(const uint8_t* from, float scale) { return fp8_values(from) * scale; }
};

template <Format F>
struct NibbleUnits {
    static constexpr bool kThere = true;
    static constexpr int kBytes = 16;
    static constexpr bool kScaled = true;
    static constexpr float kScale = 1.0f;
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
