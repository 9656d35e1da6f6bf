// Rows of weights (generic/rows.inl) for AVX2 and AVX-512, float32 products: strips as vectors of floats, the
// same values as generic/formats.inl gives, then rows of the quantised formats that are most often met.

template <>
struct VectorStrip<Format::f32> {
    const uint8_t* p;

    VectorStrip(const Matrix& m, int64_t n) : p(m.data + n * m.row_bytes) {}
    void operator()(int64_t k, Vec (&w)[kStripVectors]) const {
        const float* from = reinterpret_cast<const float*>(p) + k;
        for (int64_t v = 0; v < kStripVectors; ++v) w[v] = vload(from + v * kLanes);
    }
};

template <>
struct VectorStrip<Format::bf16> {
    const uint8_t* p;

    VectorStrip(const Matrix& m, int64_t n) : p(m.data + n * m.row_bytes) {}
    void operator()(int64_t k, Vec (&w)[kStripVectors]) const {
        const Bf16* from = reinterpret_cast<const Bf16*>(p) + k;
        for (int64_t v = 0; v < kStripVectors; ++v) w[v] = vload(from + v * kLanes);
    }
};

template <>
struct VectorStrip<Format::q8_0> {
    const uint8_t* p;

    VectorStrip(const Matrix& m, int64_t n) : p(m.data + n * m.row_bytes) {}
    void operator()(int64_t k, Vec (&w)[kStripVectors]) const {
        const uint8_t* block = p + k / kStrip * 34;
        const Vec d = vset1(half_value(block));
        for (int64_t v = 0; v < kStripVectors; ++v) w[v] = d * signed_bytes(block + 2 + v * kLanes);
    }
};

// Rows whose values are taken bare, with a scale for kEach elements, for a multiple of them or for all.
template <int64_t kStep, int64_t kEach>
struct BareRow {
    static constexpr bool kExists = true;
    static constexpr int64_t kElements = kStep, kScales = kStep / kEach;
    const Matrix& m;

    explicit BareRow(const Matrix& matrix) : m(matrix) {}
    static bool fits(const Matrix& m) { return m.block_cols % kEach == 0 || m.block_cols >= m.cols; }
    const uint8_t* at(int64_t n) const { return m.data + n * m.row_bytes; }
    // Those of `steps` steps.
    void scales_of(int64_t n, int64_t k, int64_t steps, float* to) const {
        spread(scale_at(n, k), k, steps, to, kScales);
    }
    int64_t block() const { return min_of(m.block_cols, m.cols); }
    const uint8_t* scale_at(int64_t n, int64_t k) const {
        return m.scales + static_cast<uint32_t>(n) / static_cast<uint32_t>(m.block_rows) * m.scale_row_bytes +
               k / block() * scale_size(m.scale_type);
    }
    // The values from `from` on, of element k's block, for the steps, which are `next` apart.
    void spread(const uint8_t* from, int64_t k, int64_t steps, float* to, int64_t next) const {
        const int64_t block = this->block(), first = k / block;
        if (block == kEach && next == kScales) return scale_values(from, steps * kScales, to);
        float own[kScaleSteps * kScales];
        scale_values(from, (k + steps * kStep - 1) / block - first + 1, own);
        const float* scale = own;
        if (block == kEach) {
            for (int64_t step = 0; step < steps; ++step, to += next, scale += kScales)
                memcpy(to, scale, kScales * sizeof(float));
            return;
        }
        int64_t left = (first + 1) * block - k;  // elements that it covers
        const auto take = [&](int64_t elements) {
            left -= elements;
            if (left > 0) return;
            left = block;
            ++scale;
        };
        for (int64_t step = 0; step < steps; ++step, to += next)
            if (left >= kStep) {
                for (int64_t i = 0; i < kScales; ++i) to[i] = *scale;
                take(kStep);
            } else {
                for (int64_t i = 0; i < kScales; ++i, take(kEach)) to[i] = *scale;
            }
    }
    void scale_values(const uint8_t* from, int64_t count, float* to) const {
        const auto fill = [&](auto type) {
            int64_t i = 0;
            if constexpr (type.value == ScaleType::f16)
                for (; i + kLanes <= count; i += kLanes) vstore(to + i, load_halves(from + 2 * i));
            for (; i < count; ++i)
                if constexpr (type.value == ScaleType::f16)
                    to[i] = half_value(from + 2 * i);
                else
                    to[i] = scale_value(type.value, from + i * scale_size(type.value));
        };
        switch (m.scale_type) {
#define KT_SCALE(S)    \
    case ScaleType::S: \
        return fill(std::integral_constant<ScaleType, ScaleType::S>());
            KT_SCALE(none) KT_SCALE(f32) KT_SCALE(bf16) KT_SCALE(f16) KT_SCALE(ue8m0)
#undef KT_SCALE
        }
    }
    bool met_nan() const { return false; }
    bool has_nan(int64_t) const { return false; }
};

struct ByteRow : BareRow<128, 128> {
    static constexpr int64_t kOrdered = kElements, kBytes = kElements;
    static constexpr int kParts = 1;

    using BareRow::BareRow;
    const uint8_t* raw(int64_t n, int64_t k) const { return at(n) + k; }
    static Vec first(const float*, const float*, int) { return vset1(0.0f); }
    static Vec part_scale(const float* scale, int) { return vset1(*scale); }
};

template <>
struct OrderedRow<Format::int8> : ByteRow {
    static constexpr int kUnits = kElements / kLanes;

    using ByteRow::ByteRow;
    static void order(const float* from, float* to) { memcpy(to, from, kElements * sizeof(float)); }
    template <class Add>
    [[gnu::always_inline]] void values(const uint8_t* raw, int, int unit, const Add& add) const {
        add(signed_bytes(raw + unit * kLanes), unit * kLanes);
    }
};

// E4M3 is an IEEE half without the upper bit of its exponent, times 2^8, which x takes over; subnormals are
// one's, too. NaN is a number to a half, so rows with it are looked for.
template <>
struct OrderedRow<Format::fp8> : ByteRow {
    static constexpr int kUnits = kElements / (4 * kLanes);
    Words met = {};  // the largest of all bytes without their signs

    using ByteRow::ByteRow;
    // Of a register's words the lower bytes, then the upper ones, by halves of the register.
    static void order(const float* from, float* to) {
        for (int64_t unit = 0; unit < kUnits; ++unit, from += 4 * kLanes, to += 4 * kLanes)
            for (int64_t odd = 0; odd < 2; ++odd)
                for (int64_t j = 0; j < 2 * kLanes; ++j)
                    to[odd * 2 * kLanes + j] = 256.0f * from[2 * j + odd];
    }
    template <class Add>
    [[gnu::always_inline]] void values(const uint8_t* raw, int, int unit, const Add& add) {
        const Words both = words_at(raw + unit * 4 * kLanes);
        met = larger_bytes(met, both & uint16_t{0x7f7f});
        for (int odd = 0; odd < 2; ++odd) {
            const Words raised = odd ? both : both << 8;
            const Words half = Words(SignedWords(raised) >> 1) & uint16_t{0xbf80};
            for (int h = 0; h < 2; ++h) add(half_values(half, h), (unit * 4 + odd * 2 + h) * kLanes);
        }
    }
    bool met_nan() const { return any_byte(met, 0x7f); }
    bool has_nan(int64_t n) const {
        bool found = false;
        for (int64_t k = 0; k < m.cols; ++k) found |= (at(n)[k] & 0x7f) == 0x7f;
        return found;
    }
};

// Codes of 4 bits. A byte of eight times one, below a byte 0x41, is a bfloat16: 8 and half of the code. A
// register of such words as floats is its upper words with the lower ones' bits behind them; shifted, it is
// its lower words. So x is doubled, that of a lower word is less by 2^-16 of the upper one's, and a sum
// begins with minus what the values have too much.
inline Vec lower_floats(Words w) { return vfloat(IntVec(Dwords(w) << 16)); }
inline Vec upper_floats(Words w) { return vfloat(IntVec(w)); }
// `pairs` times x of lower words and x of upper ones; to `start` what the sum of codes less `middle` begins
// with.
inline void compensate(int64_t pairs, float middle, float* x, float* start) {
    constexpr float kBehind = 0x1p-16f, kBitsBehind = 0x4100 * 0x1p-20f;
    Vec sum = vset1(0.0f);
    for (int64_t i = 0; i < pairs; ++i, x += 2 * kLanes) {
        const Vec below = 2.0f * vload(x), above = 2.0f * vload(x + kLanes);
        sum -= (8.0f + 0.5f * middle) * (below + above) + (kBitsBehind - 8.0f * kBehind) * above;
        vstore(x, below - kBehind * above);
        vstore(x + kLanes, above);
    }
    vstore(start, sum);
}
// Eight times the lower or the upper nibbles of all bytes.
[[gnu::always_inline]] inline Words nibbles(Words w, int which) {
    return (which == 0 ? w << 3 : w >> 1) & uint16_t{0x7878};
}

// Groups of 32 in four lanes each; a byte holds two elements. Unit 2 h + i has nibbles i of the bytes of half
// h of each 128 bits.
struct NibbleRow : BareRow<8 * kLanes, 32> {
    static constexpr int64_t kOrdered = 9 * kLanes, kBytes = 4 * kLanes;
    static constexpr int kParts = 1, kUnits = 4;
    struct Raw {
        Words of[2];
    };

    using BareRow::BareRow;
    // The element in word j of a unit.
    static constexpr int64_t element(int64_t unit, int64_t j) {
        return 2 * (j / 8 * 16 + unit / 2 * 8 + j % 8) + unit % 2;
    }
    static void place(const float* from, float* to) {
        for (int64_t unit = 0; unit < kUnits; ++unit)
            for (int64_t j = 0; j < 2 * kLanes; ++j)
                to[(2 * unit + j % 2) * kLanes + j / 2] = from[element(unit, j)];
    }
    static void order(const float* from, float* to, float middle) {
        place(from, to);
        compensate(kUnits, middle, to, to + kElements);
    }
    template <class Add>
    [[gnu::always_inline]] void values(const Raw& raw, int, int unit, const Add& add) const {
        const Words w = below_0x41(raw.of[unit % 2], unit / 2);
        add(lower_floats(w), 2 * unit * kLanes);
        add(upper_floats(w), (2 * unit + 1) * kLanes);
    }
    static Vec first(const float*, const float* x, int) { return vload(x + kElements); }
    static Vec part_scale(const float* scales, int) { return group_scales(scales); }
};

template <>
struct OrderedRow<Format::int4> : NibbleRow {
    using NibbleRow::NibbleRow;
    static void order(const float* from, float* to) { NibbleRow::order(from, to, 8.0f); }
    Raw raw(int64_t n, int64_t k) const {
        const Words w = words_at(at(n) + k / 2);
        return {{nibbles(w, 0), nibbles(w, 1)}};
    }
};

// Codes as they are: a lane's sum begins with minus its group's zero point times the sum of the lane's x.
template <>
struct OrderedRow<Format::uint4> : NibbleRow {
    static constexpr int64_t kGroups = kElements / 32, kSums = NibbleRow::kOrdered;
    static constexpr int64_t kOrdered = kSums + kLanes, kScales = 2 * kGroups;  // scales, then zero points

    int64_t zeros;  // bytes from a scale to its zero point

    explicit OrderedRow(const Matrix& matrix) : NibbleRow(matrix), zeros(zero_distance(matrix)) {}
    static void order(const float* from, float* to) {
        place(from, to);
        Vec sum = vset1(0.0f);
        for (int64_t i = 0; i < kElements; i += kLanes) sum += vload(to + i);
        vstore(to + kSums, sum);
        compensate(kUnits, 0.0f, to, to + kElements);
    }
    void scales_of(int64_t n, int64_t k, int64_t steps, float* to) const {
        const uint8_t* from = scale_at(n, k);
        spread(from, k, steps, to, kScales);
        spread(from + zeros, k, steps, to + kGroups, kScales);
    }
    Raw raw(int64_t n, int64_t k) const {
        const Words w = words_at(at(n) + k / 2);
        return {{nibbles(w, 0), nibbles(w, 1)}};
    }
    static Vec first(const float* scales, const float* x, int) {
        return vload(x + kElements) - group_scales(scales + kGroups) * vload(x + kSums);
    }
};

// E2M1: the values and 6 take the place of codes.
inline NibbleRow::Raw e2m1_codes(Words w) {
    const __m128i codes = _mm_setr_epi8(48, 52, 56, 60, 64, 72, 80, 96, 48, 44, 40, 36, 32, 24, 16, 0);
    return {{looked_up(codes, w & uint16_t{0x0f0f}), looked_up(codes, w >> 4 & uint16_t{0x0f0f})}};
}
template <>
struct OrderedRow<Format::mxfp4> : NibbleRow {
    using NibbleRow::NibbleRow;
    static void order(const float* from, float* to) { NibbleRow::order(from, to, 6.0f); }
    Raw raw(int64_t n, int64_t k) const { return e2m1_codes(words_at(at(n) + k / 2)); }
};

// Groups of 16, each a part's: of every block of 32 the first has half h = 0 of NibbleRow's units, the second
// half 1. A block's two scales lie before its nibbles.
template <>
struct OrderedRow<Format::nvfp4> : BareRow<8 * kLanes, 16> {
    static constexpr int64_t kBlock = FormatTraits<Format::nvfp4>::kBytes, kBlocks = kElements / kStrip;
    static constexpr int64_t kBytes = kBlocks * kBlock;
    static constexpr int kParts = 2, kUnits = 2;
    static constexpr int64_t kPart = 5 * kLanes, kOrdered = kParts * kPart;

    using BareRow::BareRow;
    static void order(const float* from, float* to) {
        for (int64_t part = 0; part < kParts; ++part, to += kPart) {
            for (int64_t unit = 0; unit < kUnits; ++unit)
                for (int64_t j = 0; j < 2 * kLanes; ++j)
                    to[(2 * unit + j % 2) * kLanes + j / 2] = from[NibbleRow::element(2 * part + unit, j)];
            compensate(kUnits, 6.0f, to, to + 4 * kLanes);
        }
    }
    void scales_of(int64_t n, int64_t k, int64_t steps, float* to) const {
        const float all = strip_scale(m, n, 0);
        const uint8_t* block = block_at<Format::nvfp4>(m, n, k);
        for (int64_t step = 0; step < steps; ++step, to += kScales)
            for (int64_t i = 0; i < kBlocks; ++i, block += kBlock)
                for (int64_t part = 0; part < kParts; ++part)
                    to[part * kBlocks + i] = kFp8.of[block[part]] * all;
    }
    NibbleRow::Raw raw(int64_t n, int64_t k) const {
        return e2m1_codes(words_of_blocks(block_at<Format::nvfp4>(m, n, k) + kParts, kBlock));
    }
    template <class Add>
    [[gnu::always_inline]] void values(const NibbleRow::Raw& raw, int part, int unit, const Add& add) const {
        const Words w = below_0x41(raw.of[unit], part);
        add(lower_floats(w), part * kPart + 2 * unit * kLanes);
        add(upper_floats(w), part * kPart + (2 * unit + 1) * kLanes);
    }
    static Vec first(const float*, const float* x, int part) { return vload(x + part * kPart + 4 * kLanes); }
    static Vec part_scale(const float* scales, int part) { return group_scales(scales + part * kBlocks); }
};

// A block of 256: bytes [32 c, 32 c + 32) have the elements of sub-block 2 c in their lower nibbles, of 2 c +
// 1 in the upper ones. A part has one of them, with 16 lanes two: 4 i + h and 4 i + h + 2.
template <>
struct OrderedRow<Format::q4_k> {
    static constexpr bool kExists = true;
    static constexpr int64_t kElements = 256, kScales = 16, kBytes = 144;
    static constexpr int kParts = 64 / kLanes, kUnits = 2;
    static constexpr int64_t kPart = 5 * kLanes, kOrdered = kParts * kPart + 16;
    const Matrix& m;

    explicit OrderedRow(const Matrix& matrix) : m(matrix) {}
    static bool fits(const Matrix&) { return true; }
    static void order(const float* from, float* to) {
        float sums[16] = {};
        for (int64_t k = 0; k < kElements; ++k) sums[8 + k / 32] += from[k];
        memcpy(to + kParts * kPart, sums, sizeof(sums));
        for (int64_t part = 0; part < kParts; ++part, to += kPart) {
            for (int64_t unit = 0; unit < kUnits; ++unit)
                for (int64_t j = 0; j < 2 * kLanes; ++j) {  // words
                    const int64_t byte = j / 8 * 16 + unit * 8 + j % 8;
                    const int64_t sub = part / 2 * kLanes / 4 + part % 2 + byte / 32 * 2;
                    to[(2 * unit + j % 2) * kLanes + j / 2] = from[sub * 32 + byte % 32];
                }
            compensate(kUnits, 0.0f, to, to + 4 * kLanes);
        }
    }
    // Scales, then minimums (k_scale_min_bits).
    void scales_of(int64_t n, int64_t k, int64_t steps, float* to) const {
        const uint8_t* p = m.data + n * m.row_bytes + k / kElements * kBytes;
        for (int64_t step = 0; step < steps; ++step, p += kBytes, to += kScales) {
            const uint32_t a = load_as<uint32_t>(p + 4), b = load_as<uint32_t>(p + 8),
                           c = load_as<uint32_t>(p + 12);
            const uint32_t bits[4] = {a & 0x3f3f3f3fu, (c & 0x0f0f0f0fu) | (a >> 2 & 0x30303030u),
                                      b & 0x3f3f3f3fu, (c >> 4 & 0x0f0f0f0fu) | (b >> 2 & 0x30303030u)};
            const uint8_t* bytes = reinterpret_cast<const uint8_t*>(bits);
            const float d = half_value(p), e = half_value(p + 2);
            for (int64_t i = 0; i < 8; ++i) to[i] = d * static_cast<float>(bytes[i]);
            for (int64_t i = 8; i < 16; ++i) to[i] = e * static_cast<float>(bytes[i]);
        }
    }
    const uint8_t* raw(int64_t n, int64_t k) const {
        return m.data + n * m.row_bytes + k / kElements * kBytes + 16;
    }
    template <class Add>
    [[gnu::always_inline]] void values(const uint8_t* raw, int part, int unit, const Add& add) const {
        const Words w = below_0x41(nibbles(words_at(raw + part / 2 * 4 * kLanes), part % 2), unit);
        const int64_t at = part * kPart + 2 * unit * kLanes;
        add(lower_floats(w), at);
        add(upper_floats(w), at + kLanes);
    }
    static Vec first(const float*, const float* x, int part) { return vload(x + part * kPart + 4 * kLanes); }
    static Vec part_scale(const float* scales, int part) {
        return sub_block_scales(scales + part / 2 * kLanes / 4 + part % 2);
    }
    // Less the minimums times the sums of x.
    static Vec last(const float* scales, const float* x, Vec sum) {
        return sum - vload(scales + 16 - kLanes) * vload(x + kParts * kPart + 16 - kLanes);
    }
    bool met_nan() const { return false; }
    bool has_nan(int64_t) const { return false; }
};
