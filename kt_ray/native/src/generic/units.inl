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
    static constexpr bool kBlocks = false;
};

template <>
struct Units<Format::f32> {
    static constexpr bool kThere = true;
    static constexpr bool kBlocks = false;
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
    static constexpr bool kBlocks = false;
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
    static constexpr bool kBlocks = false;
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
    static constexpr bool kBlocks = false;
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
    static constexpr bool kBlocks = false;
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

// Codes: whoever reads them takes off the zero points and multiplies by the scales.
template <>
struct Units<Format::uint4> : NibbleUnits<Format::int4> {
    static constexpr bool kZeros = true;
    static Vec codes(Bits v) { return unbiased<0>(v & 15u); }
    template <class Put>
    static void each(int d, Bits v, Vec, const Put& put) {
        for (int j = 0; j < 8; ++j) put(8 * d + j, codes(v >> (4 * j)));
    }
    static Vec row(const uint8_t* from, float) { return codes(load_nibbles(from)); }
};

// GGUF formats, along columns only: `two` are the 2 * kLanes elements from column k on of a row whose block
// is at `block`. A code has its low bits in nibbles at `low`, the others at `high`.
struct BlockPlace {
    int64_t low, high = 0;
    int low_shift = 0, high_shift = 0;
    int64_t sub;  // strip of the block

    explicit BlockPlace(int64_t offset, int64_t k) : low(offset + k % kStrip), sub(k % 256 / kStrip) {}
};

template <Format F>
struct BlockUnits {
    static constexpr bool kThere = true, kBlocks = true, kScaled = false;
    static constexpr int kBytes = static_cast<int>(strip_bytes(F) / 8);
    static constexpr float kScale = 1.0f;
};

// Its rows have a factor each, which is the matrix' scale. Along rows a piece has the elements of one scale.
template <>
struct Units<Format::nvfp4> : BlockUnits<Format::nvfp4> {
    static constexpr bool kAlongRows = true;
    template <class Put>
    static void each(int d, Bits v, Vec scales, const Put& put) {
        for (int j = 0; j < 8; ++j) put(8 * d + j, fp4_values(v >> (4 * j)) * scales);
    }
    static BlockPlace place(int64_t k) { return BlockPlace(0, k); }
    template <class Put>
    [[gnu::always_inline]] static void two(const uint8_t* block, const BlockPlace& place, float factor,
                                           const Put& put) {
        for (int v = 0; v < 2; ++v) {
            const int64_t column = place.low + v * kLanes;
            put(v, fp4_values(load_nibbles(block + 2 + column / 2)) *
                       (fp8_to_float(block[column / 16]) * factor));
        }
    }
};

template <>
struct Units<Format::q8_0> : BlockUnits<Format::q8_0> {
    static BlockPlace place(int64_t k) { return BlockPlace(2, k); }
    template <class Put>
    [[gnu::always_inline]] static void two(const uint8_t* block, const BlockPlace& place, const Put& put) {
        const float scale = half_value(block);
        for (int v = 0; v < 2; ++v)
            put(v, unbiased<128>(load_bytes(block + place.low + v * kLanes) ^ 0x80u) * scale);
    }
};

// Scale times code less minimum: each rounded, as in KTraits.
template <Format F>
struct ScaledMinUnits : BlockUnits<F> {
    static constexpr bool kFifthBit = F == Format::q5_k;
    static BlockPlace place(int64_t k) {
        BlockPlace place(kFifthBit ? 48 : 16, k);
        place.low += place.sub / 2 * kStrip;
        place.low_shift = static_cast<int>(place.sub % 2 * 4);
        place.high = 16 + k % kStrip;
        place.high_shift = static_cast<int>(place.sub);
        return place;
    }
    template <class Put>
    [[gnu::always_inline]] static void two(const uint8_t* block, const BlockPlace& place, const Put& put) {
        const uint32_t bits = k_scale_min_bits(block + 4, place.sub);
        const float scale = half_value(block) * static_cast<float>(static_cast<int32_t>(bits & 0xffff));
        const float min = half_value(block + 2) * static_cast<float>(static_cast<int32_t>(bits >> 16));
        for (int v = 0; v < 2; ++v) {
            Bits code = load_bytes(block + place.low + v * kLanes) >> place.low_shift & 15u;
            if constexpr (kFifthBit)
                code |= (load_bytes(block + place.high + v * kLanes) >> place.high_shift & 1u) << 4;
            put(v, unbiased<0>(code) * scale - min);
        }
    }
};
template <>
struct Units<Format::q4_k> : ScaledMinUnits<Format::q4_k> {};
template <>
struct Units<Format::q5_k> : ScaledMinUnits<Format::q5_k> {};

template <>
struct Units<Format::q6_k> : BlockUnits<Format::q6_k> {
    static BlockPlace place(int64_t k) {
        BlockPlace place(0, k);
        const int64_t half = place.sub / 4, s = place.sub % 4;
        place.low += half * 64 + s % 2 * kStrip;
        place.low_shift = static_cast<int>(s / 2 * 4);
        place.high = 128 + half * 32 + k % kStrip;
        place.high_shift = static_cast<int>(s * 2);
        return place;
    }
    template <class Put>
    [[gnu::always_inline]] static void two(const uint8_t* block, const BlockPlace& place, const Put& put) {
        const float d = half_value(block + 208);
        for (int v = 0; v < 2; ++v) {
            const int64_t column = place.high % kStrip + v * kLanes;  // of the strip
            const int32_t scale = static_cast<int8_t>(block[192 + place.sub * 2 + column / 16]);
            const Bits code = (load_bytes(block + place.low + v * kLanes) >> place.low_shift & 15u) |
                              (load_bytes(block + place.high + v * kLanes) >> place.high_shift & 3u) << 4;
            put(v, (d * static_cast<float>(scale)) * unbiased<32>(code));
        }
    }
};
