// Dot products of stored rows with a few bfloat16 rows (generic/moe_rows.inl), 16 lanes along the
// contraction.
//
// Integers of up to 8 bits and E4M3's values are exact bfloat16. The products of the formats below take these
// values bare, and the scale multiplies the float32 sums of the elements that it covers, so no weight is
// rounded. x is put in the order in which a register of the format's bytes comes apart: words are masked and
// shifted, never moved.
//
// A step is a stretch of a row. raw() reads it; word(q) is its q-th register of values, which multiplies x at
// x_at(q); kPart words add up to a sum that part_scale(p) multiplies (kPart 0: no scale, words add up in
// order). The words of several rows take turns: the sums' latency would otherwise fill the core's schedulers.

// Every format: strips as panels hold them, rounded to bfloat16.
template <Format F>
struct StripRow {
    static constexpr int64_t kElements = kStrip;  // of a step
    static constexpr int64_t kOrdered = kStrip;   // elements of ordered x that a step takes
    static constexpr int64_t kBytes = FormatTraits<F>::kBytes * kStrip / FormatTraits<F>::kElements;
    static constexpr int64_t kScales = 0;  // of a step, as scales_of() gives them
    static constexpr int kWords = 1, kPart = 0;
    Strip<F> strip;

    explicit StripRow(const Matrix& m) : strip(m) {}
    static void order(const Bf16* from, Bf16* to) { memcpy(to, from, kElements * sizeof(Bf16)); }
    KT_INLINE __m512i raw(int64_t n, int64_t k) const { return strip.bf16(n, k); }
    KT_INLINE __m512i word(__m512i raw, int) const { return raw; }
    static constexpr int64_t x_at(int) { return 0; }
};

// Formats that have something faster.
template <Format F>
struct FastRow;

// Steps of 128 elements, whose scales cover 32, 128 or all of a row.
template <int64_t kEach>
struct ScaledRow {
    static constexpr int64_t kElements = 128, kScales = kEach;
    const uint8_t* data;
    int64_t row_bytes;
    StripScales scales;
    int64_t columns;  // that a scale covers; 0: all

    explicit ScaledRow(const Matrix& m)
        : data(m.data),
          row_bytes(m.row_bytes),
          scales(m),
          columns(m.block_cols >= m.cols ? 0 : m.block_cols) {}
    static bool fits(const Matrix& m) {
        return m.block_cols == kElements / kEach || m.block_cols == kElements || m.block_cols >= m.cols;
    }
    KT_INLINE const uint8_t* at(int64_t n) const { return data + n * row_bytes; }
    // Those of `steps` steps.
    void scales_of(int64_t n, int64_t k, int64_t steps, float* to) const {
        const int64_t count = steps * kEach;
        const uint8_t* p = scales.at + scales.rows(n) * scales.row_bytes;
        if (columns * kEach == kElements) {
            p += k / columns * scales.size;
            for (int64_t i = 0; i < count; i += 16, p += 16 * scales.size)
                _mm512_storeu_ps(to + i, scales_16(scales.type, p, some_of(count - i)));
            return;
        }
        for (int64_t step = 0; step < steps; ++step) {
            const float v = scale_value(scales.type, columns == 0 ? p : p + (k / 128 + step) * scales.size);
            for (int64_t i = 0; i < kEach; ++i) to[step * kEach + i] = v;
        }
    }
    static __mmask16 some_of(int64_t left) {
        return static_cast<__mmask16>(left >= 16 ? 0xffff : (1 << left) - 1);
    }
};

KT_INLINE __m512i x_at_32(const Bf16* x, int64_t i) { return _mm512_loadu_si512(x + i * kStrip); }

// Words 0, 2, 4 ... of two registers, or 1, 3, 5 ...
inline __m512i every_other(__m512i a, __m512i b, int odd) {
    const __m512i steps = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    // 4 j and 4 j + 2 in dword j
    const __m512i even =
        _mm512_add_epi32(_mm512_mullo_epi32(steps, _mm512_set1_epi32(0x40004)), _mm512_set1_epi32(0x20000));
    return _mm512_permutex2var_epi16(a, _mm512_add_epi16(even, _mm512_set1_epi16(static_cast<int16_t>(odd))),
                                     b);
}
// The sums of a register's pairs.
KT_INLINE __m512 pair_sums(__m512 sum, __m512i x) {
    return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)_mm512_set1_epi16(0x3f80));
}

// Two registers of 64 bytes; words are their even bytes and their odd ones.
struct ByteRow : ScaledRow<1> {
    static constexpr int64_t kOrdered = 128, kBytes = 128;
    struct Raw {
        __m512i v[2];
    };

    using ScaledRow::ScaledRow;
    static void order(const Bf16* from, Bf16* to) {
        for (int i = 0; i < 4; ++i)
            _mm512_storeu_si512(to + i * kStrip,
                                every_other(x_at_32(from, i / 2 * 2), x_at_32(from, i / 2 * 2 + 1), i % 2));
    }
    KT_INLINE Raw raw(int64_t n, int64_t k) const {
        return {{_mm512_loadu_si512(at(n) + k), _mm512_loadu_si512(at(n) + k + 64)}};
    }
    KT_INLINE static __m512 first(const Bf16*) { return _mm512_setzero_ps(); }
    KT_INLINE static __m512 part_scale(const Raw&, const float* scale, int) { return _mm512_set1_ps(*scale); }
};

// (words & mask) | bits
KT_INLINE __m512i masked_or(__m512i words, int mask, int bits) {
    return _mm512_ternarylogic_epi32(words, _mm512_set1_epi16(static_cast<int16_t>(mask)),
                                     _mm512_set1_epi16(static_cast<int16_t>(bits)), 0xea);
}

// Two's complement is its lower 7 bits minus 128 times the sign bit: (128 + bits) - (128 + 128 sign), either
// of them a bfloat16 that has the bits where they are.
template <>
struct FastRow<Format::int8> : ByteRow {
    static constexpr int kWords = 8, kPart = 8;

    using ByteRow::ByteRow;
    KT_INLINE __m512i word(const Raw& raw, int q) const {
        const __m512i v = raw.v[q / 4], words = q & 2 ? _mm512_srli_epi16(v, 8) : v;
        return q & 1 ? masked_or(words, 0x80, 0xc300) : masked_or(words, 0x7f, 0x4300);
    }
    static constexpr int64_t x_at(int q) { return q / 2 * kStrip; }
};

// Byte 2 j of either of two registers in word j.
constexpr Bytes kEvenPairs = [] {
    Bytes bytes{};
    for (int i = 0; i < 64; ++i) bytes.of[i] = static_cast<uint8_t>(i / 2 * 2 + i % 2 * 64);
    return bytes;
}();

// E4M3: the lower and the upper bytes of its values, looked up and put together.
template <>
struct FastRow<Format::fp8> : ByteRow {
    static constexpr int kWords = 4, kPart = 4;
    ByteTables table;
    __m512i even, odd;

    explicit FastRow(const Matrix& m)
        : ByteRow(m),
          table(kFp8Words),
          even(_mm512_load_si512(kEvenPairs.of)),
          odd(_mm512_or_si512(even, _mm512_set1_epi8(1))) {}
    struct Raw {
        __m512i low[2], high[2];
    };
    KT_INLINE Raw raw(int64_t n, int64_t k) const {
        Raw raw;
        for (int i = 0; i < 2; ++i) {
            const __m512i v = _mm512_loadu_si512(at(n) + k + 64 * i);
            raw.low[i] = table.lower_of(v);
            raw.high[i] = table.upper_of(v);
        }
        return raw;
    }
    KT_INLINE __m512i word(const Raw& raw, int q) const {
        return _mm512_permutex2var_epi8(raw.low[q / 2], q % 2 ? odd : even, raw.high[q / 2]);
    }
    static constexpr int64_t x_at(int q) { return q * kStrip; }
    KT_INLINE static __m512 part_scale(const Raw&, const float* scale, int) { return _mm512_set1_ps(*scale); }
};

// 64 bytes: word j of 32 holds elements 4 j to 4 j + 3, and a lane of 128 bits the 32 of a group.
struct NibbleRow : ScaledRow<4> {
    static constexpr int64_t kBytes = 64;
    static constexpr int kWords = 4, kPart = 4;

    using ScaledRow::ScaledRow;
    static void order(const Bf16* from, Bf16* to) {
        for (int odd = 0; odd < 2; ++odd) {
            const __m512i low = every_other(x_at_32(from, 0), x_at_32(from, 1), odd);
            const __m512i high = every_other(x_at_32(from, 2), x_at_32(from, 3), odd);
            _mm512_storeu_si512(to + odd * kStrip, every_other(low, high, 0));
            _mm512_storeu_si512(to + (odd + 2) * kStrip, every_other(low, high, 1));
        }
    }
    KT_INLINE __m512i raw(int64_t n, int64_t k) const { return _mm512_loadu_si512(at(n) + k / 2); }
    static constexpr int64_t x_at(int q) { return q * kStrip; }
    KT_INLINE static __m512 part_scale(__m512i, const float* four, int) {
        return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3),
                                     _mm512_castps128_ps512(_mm_loadu_ps(four)));
    }
};

// Nibble q of each word as 128 + it: the lowest bits of that bfloat16.
KT_INLINE __m512i raised_nibbles(__m512i words, int q) {
    if (q == 0) return masked_or(words, 15, 0x4300);
    if (q == 3) return _mm512_or_si512(_mm512_srli_epi16(words, 12), _mm512_set1_epi16(0x4300));
    return masked_or(_mm512_srli_epi16(words, static_cast<unsigned>(4 * q)), 15, 0x4300);
}

// Behind a step's x are the sums of what a lane multiplies, times -136: the nibbles' surplus.
template <>
struct FastRow<Format::int4> : NibbleRow {
    static constexpr int64_t kOrdered = 128 + 32;

    using NibbleRow::NibbleRow;
    static void order(const Bf16* from, Bf16* to) {
        NibbleRow::order(from, to);
        __m512 sums = _mm512_setzero_ps();
        for (int q = 0; q < 4; ++q) sums = pair_sums(sums, x_at_32(to, q));
        _mm512_storeu_ps(to + kElements, _mm512_mul_ps(sums, _mm512_set1_ps(-136.0f)));
    }
    KT_INLINE __m512i word(__m512i raw, int q) const { return raised_nibbles(raw, q); }
    KT_INLINE static __m512 first(const Bf16* x) { return _mm512_loadu_ps(x + kElements); }
};

// Likewise, times -128; zero points times scales, over 128, take off what is left.
template <>
struct FastRow<Format::uint4> : NibbleRow {
    static constexpr int64_t kOrdered = 128 + 32, kScales = 8;  // four scales, then those
    int64_t zeros;                                              // bytes from a scale to its zero point

    explicit FastRow(const Matrix& m) : NibbleRow(m), zeros(zero_distance(m)) {}
    static void order(const Bf16* from, Bf16* to) {
        NibbleRow::order(from, to);
        __m512 sums = _mm512_setzero_ps();
        for (int q = 0; q < 4; ++q) sums = pair_sums(sums, x_at_32(to, q));
        _mm512_storeu_ps(to + kElements, _mm512_mul_ps(sums, _mm512_set1_ps(-128.0f)));
    }
    void scales_of(int64_t n, int64_t k, int64_t steps, float* to) const {
        const uint8_t* p = scales.at + n * scales.row_bytes;
        if (columns > 0) p += k / columns * scales.size;
        if (columns == 32) {
            for (int64_t i = 0; i < 4 * steps; i += 16, p += 16 * scales.size, to += 32) {
                const __mmask16 some = some_of(4 * steps - i);
                const __m512 own = scales_16(scales.type, p, some);
                const __m512 zero = products(own, scales_16(scales.type, p + zeros, some));
                const __m512i steps_0_1 =
                    _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
                const __m512i steps_2_3 = _mm512_add_epi32(steps_0_1, _mm512_set1_epi32(8));
                _mm512_storeu_ps(to, _mm512_permutex2var_ps(own, steps_0_1, zero));
                _mm512_storeu_ps(to + 16, _mm512_permutex2var_ps(own, steps_2_3, zero));
            }
            return;
        }
        const int64_t size = columns == 0 ? 0 : scales.size;
        for (int64_t step = 0; step < steps; ++step, p += size, to += 8) {
            const __m512 own = scales(p);
            _mm256_storeu_ps(to, _mm512_castps512_ps256(
                                     _mm512_mask_blend_ps(0xf0, own, products(own, scales(p + zeros)))));
        }
    }
    KT_INLINE static __m512 products(__m512 own, __m512 zero) {
        return _mm512_mul_ps(_mm512_mul_ps(own, zero), _mm512_set1_ps(0x1p-7f));
    }
    KT_INLINE __m512i word(__m512i raw, int q) const { return raised_nibbles(raw, q); }
    KT_INLINE static __m512 first(const Bf16* x) { return _mm512_loadu_ps(x + kElements); }
    KT_INLINE static __m512 last(__m512i raw, const float* scales, const Bf16* x, __m512 sum) {
        return _mm512_fmadd_ps(part_scale(raw, scales + 4, 0), _mm512_loadu_ps(x + kElements), sum);
    }
};

// A look-up takes the lowest five bits of a word: the fifth does not matter, as both halves of the table are
// the same.
template <>
struct FastRow<Format::mxfp4> : NibbleRow {
    static constexpr int64_t kOrdered = 128;
    __m512i table;

    explicit FastRow(const Matrix& m) : NibbleRow(m) {
        const __m512 values = e2m1_values();
        table = rounded(values, values);
    }
    KT_INLINE __m512i word(__m512i raw, int q) const {
        return look_up(table, q == 0 ? raw : _mm512_srli_epi16(raw, static_cast<unsigned>(4 * q)));
    }
    KT_INLINE static __m512 first(const Bf16*) { return _mm512_setzero_ps(); }
};

// A scale for 16 elements, which two lanes have; it comes before the codes of its block.
template <>
struct FastRow<Format::nvfp4> : FastRow<Format::mxfp4> {
    static constexpr int64_t kBlock = FormatTraits<Format::nvfp4>::kBytes, kBlocks = kElements / kStrip;
    static constexpr int64_t kBytes = kBlocks * kBlock, kScales = 2 * kBlocks;

    using FastRow<Format::mxfp4>::FastRow;
    KT_INLINE const uint8_t* block(int64_t n, int64_t k) const { return at(n) + k / kStrip * kBlock; }
    void scales_of(int64_t n, int64_t k, int64_t steps, float* to) const {
        const float all = scale_value(scales.type, scales.at);
        const uint8_t* p = block(n, k);
        for (int64_t i = 0; i < steps * kBlocks; ++i, p += kBlock, to += 2)
            for (int64_t half = 0; half < 2; ++half) to[half] = kFp8.of[p[half]] * all;
    }
    KT_INLINE __m512i raw(int64_t n, int64_t k) const { return blocks_of_16(block(n, k) + 2, kBlock); }
    KT_INLINE static __m512 part_scale(__m512i, const float* eight, int) {
        return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7),
                                     _mm512_castps256_ps512(_mm256_loadu_ps(eight)));
    }
};

// A block of 256: bytes [32 c, 32 c + 32) have the elements of sub-block 2 c in their low nibbles, of
// 2 c + 1 in the high ones. Behind its x are the sums of each sub-block's, beside 128 times them, in the
// order of minimums and scales below: they take off the minimums and the nibbles' surplus.
template <>
struct FastRow<Format::q4_k> {
    static constexpr int64_t kElements = 256, kOrdered = 256 + 32, kBytes = 144, kScales = 0;
    static constexpr int kWords = 8, kPart = 2;
    const uint8_t* data;
    int64_t row_bytes;
    struct Raw {
        __m512i v[2];
        __m512 scales;
    };

    explicit FastRow(const Matrix& m) : data(m.data), row_bytes(m.row_bytes) {}
    static void order(const Bf16* from, Bf16* to) {
        float sums[16];
        for (int i = 0; i < 4; ++i) {  // sub-blocks a and a + 2
            const int a = i / 2 * 4 + i % 2;
            __m512 lanes = _mm512_setzero_ps();
            for (int odd = 0; odd < 2; ++odd) {
                const __m512i x = every_other(x_at_32(from, a), x_at_32(from, a + 2), odd);
                _mm512_storeu_si512(to + (2 * i + odd) * kStrip, x);
                lanes = pair_sums(lanes, x);
            }
            for (int half = 0; half < 2; ++half) {
                const float sum = _mm512_mask_reduce_add_ps(half == 0 ? 0x00ff : 0xff00, lanes);
                const int at = i / 2 * 8 + i % 2 + 2 * half;
                sums[at] = 128.0f * sum;
                sums[at + 4] = sum;
            }
        }
        memcpy(to + kElements, sums, sizeof(sums));
    }
    KT_INLINE Raw raw(int64_t n, int64_t k) const {
        const uint8_t* p = data + n * row_bytes + k / kElements * kBytes;
        // k_scale_min_bits of all sub-blocks: scales 0 to 3, minimums 0 to 3, scales 4 to 7, minimums 4 to 7.
        const uint64_t first = load_as<uint64_t>(p + 4), last = load_as<uint32_t>(p + 12);
        const uint64_t high = (last | last << 28) & 0x0f0f0f0f0f0f0f0fu;
        const __m128i both = _mm_set_epi64x(static_cast<int64_t>(high | (first >> 2 & 0x3030303030303030u)),
                                            static_cast<int64_t>(first & 0x3f3f3f3f3f3f3f3fu));
        const __m512 halves =
            _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1),
                                  _mm512_castps128_ps512(four_halves(p)));
        return {{_mm512_loadu_si512(p + 16), _mm512_loadu_si512(p + 80)},
                _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(both)), halves)};
    }
    // Words of the same sub-blocks follow each other: nibbles 0 and 2, then 1 and 3.
    KT_INLINE __m512i word(const Raw& raw, int q) const {
        return raised_nibbles(raw.v[q / 4], q % 2 * 2 + q % 4 / 2);
    }
    static constexpr int64_t x_at(int q) { return q * kStrip; }
    KT_INLINE static __m512 first(const Bf16*) { return _mm512_setzero_ps(); }
    // Sub-blocks i and i + 2 in the halves of a register.
    KT_INLINE static __m512 part_scale(const Raw& raw, const float*, int part) {
        const int i = part / 2 * 8 + part % 2, j = i + 2;
        return _mm512_permutexvar_ps(_mm512_setr_epi32(i, i, i, i, i, i, i, i, j, j, j, j, j, j, j, j),
                                     raw.scales);
    }
    KT_INLINE static __m512 last(const Raw& raw, const float*, const Bf16* x, __m512 sum) {
        return _mm512_fnmadd_ps(raw.scales, _mm512_loadu_ps(x + kElements), sum);
    }
};

KT_INLINE __m512 dot_pairs(__m512 sum, __m512i w, const Bf16* x) {
    return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)_mm512_loadu_si512(x));
}

// A step of rows n to n + G - 1 with M rows of x, `ld` apart.
template <int G, int M, class Row>
KT_INLINE void add_step(const Row& row, int64_t n, int64_t k, const float* const* scales, const Bf16* x,
                        int64_t ld, __m512 (*sum)[M]) {
    decltype(row.raw(n, k)) raw[G];
    for (int g = 0; g < G; ++g) raw[g] = row.raw(n + g, k);
    if constexpr (Row::kPart == 0) {
        for (int g = 0; g < G; ++g)
            for (int m = 0; m < M; ++m) sum[g][m] = dot_pairs(sum[g][m], row.word(raw[g], 0), x + m * ld);
    } else {
        for (int part = 0; part < Row::kWords / Row::kPart; ++part) {
            __m512 of[G][M];
            for (int g = 0; g < G; ++g)
                for (int m = 0; m < M; ++m) of[g][m] = Row::first(x + m * ld);
#pragma GCC unroll 8
            for (int q = part * Row::kPart; q < (part + 1) * Row::kPart; ++q)
                for (int g = 0; g < G; ++g) {
                    const __m512i w = row.word(raw[g], q);
                    for (int m = 0; m < M; ++m) of[g][m] = dot_pairs(of[g][m], w, x + m * ld + Row::x_at(q));
                }
            for (int g = 0; g < G; ++g) {
                const __m512 scale = Row::part_scale(raw[g], scales[g], part);
                for (int m = 0; m < M; ++m) sum[g][m] = _mm512_fmadd_ps(of[g][m], scale, sum[g][m]);
            }
        }
        if constexpr (requires { Row::last(raw[0], scales[0], x, sum[0][0]); })
            for (int g = 0; g < G; ++g)
                for (int m = 0; m < M; ++m) sum[g][m] = Row::last(raw[g], scales[g], x + m * ld, sum[g][m]);
    }
}

// The sums of the lanes of four registers.
KT_INLINE __m128 lane_sums(const __m512 (&v)[4]) {
    __m128 s[4];
    for (int r = 0; r < 4; ++r) {
        const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(v[r]), _mm512_extractf32x8_ps(v[r], 1));
        s[r] = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    }
    _MM_TRANSPOSE4_PS(s[0], s[1], s[2], s[3]);
    return _mm_add_ps(_mm_add_ps(s[0], s[1]), _mm_add_ps(s[2], s[3]));
}

struct RowsBf16 {
    template <Format F>
    static constexpr bool kHasFast =
        F == Format::fp8 || F == Format::int8 || F == Format::int4 || F == Format::uint4 ||
        F == Format::mxfp4 || F == Format::nvfp4 || F == Format::q4_k;

    // use(Row<F>) with the format's own row where `fast`, else with its strips.
    template <class Use>
    static void with_row(const Matrix& m, bool fast, const Use& use) {
        switch (m.format) {
#define KT_FORMAT(F)                                                        \
    case Format::F:                                                         \
        if constexpr (kHasFast<Format::F>)                                  \
            if (fast) return use(FastRow<Format::F>(m), Kind<Format::F>()); \
        return use(StripRow<Format::F>(m), Kind<Format::F>());
            KT_FORMATS(KT_FORMAT)
#undef KT_FORMAT
        }
    }
    template <Format F>
    struct Kind {
        static constexpr Format value = F;
    };

    // Whether the format's own row takes this matrix; it reads x in its own order.
    static bool fast(const Matrix& m) {
        switch (m.format) {
            case Format::fp8:
            case Format::int8:
                return ByteRow::fits(m);
            case Format::int4:
            case Format::uint4:
            case Format::mxfp4:
            case Format::nvfp4:
                return NibbleRow::fits(m);
            default:
                return m.format == Format::q4_k;
        }
    }
    static int64_t ordered_size(int64_t depth) { return depth / 4 * 5 / kStrip * kStrip + kStrip; }

    // Whole steps in order, the rest as it is.
    static void order(const Matrix& m, const Bf16* from, Bf16* to) {
        with_row(m, true, [&](const auto& row, auto) {
            int64_t k = 0;
            for (; k + row.kElements <= m.cols; k += row.kElements, to += row.kOrdered)
                row.order(from + k, to);
            memcpy(to, from + k, (pieces(m.cols, kStrip) * kStrip - k) * sizeof(Bf16));
        });
    }

    template <Format F, int R, int M, class Row>
    static void tile(const Row& row, const Matrix& m, int64_t n, const Bf16* x, int64_t ld,
                     const uint8_t* far, float* to) {
        constexpr int G = M >= R ? 1 : R / M;
        alignas(64) float scales[R][kScaleSteps * Row::kScales + 16];
        __m512 sum[R][M];
        for (auto& of_row : sum)
            for (__m512& s : of_row) s = _mm512_setzero_ps();
        int64_t k = 0;
        while (k + Row::kElements <= m.cols) {
            const int64_t steps = min_of(kScaleSteps, (m.cols - k) / Row::kElements);
            if constexpr (Row::kScales > 0)
                for (int r = 0; r < R; ++r) row.scales_of(n + r, k, steps, scales[r]);
            for (int64_t step = 0; step < steps; ++step, k += Row::kElements, x += Row::kOrdered) {
                if (far != nullptr) {
                    for (int r = 0; r < R; ++r)
                        for (int64_t byte = 0; byte < Row::kBytes; byte += 64)
                            _mm_prefetch(reinterpret_cast<const char*>(far) + r * m.row_bytes + byte,
                                         _MM_HINT_T1);
                    far += Row::kBytes;
                }
                const float* of_rows[R];
                for (int r = 0; r < R; ++r) of_rows[r] = scales[r] + step * Row::kScales;
#pragma GCC unroll 4
                for (int r = 0; r < R; r += G) add_step<G, M>(row, n + r, k, of_rows + r, x, ld, sum + r);
            }
        }
        for (; k < m.cols; k += kStrip, x += kStrip)
            for (int r = 0; r < R; ++r) {
                float values[kStrip] = {};
                strip<F>(m, n + r, k, min_of(kStrip, m.cols - k), values);
                const __m512i w = rounded(_mm512_loadu_ps(values), _mm512_loadu_ps(values + 16));
                for (int i = 0; i < M; ++i) sum[r][i] = dot_pairs(sum[r][i], w, x + i * ld);
            }
        for (int i = 0; i < M; ++i) {
            __m512 of_token[4] = {};
            for (int r = 0; r < R; ++r) of_token[r] = sum[r][i];
            float sums[4];
            _mm_storeu_ps(sums, lane_sums(of_token));
            for (int r = 0; r < R; ++r) to[i * 2 * kLanes + r] = sums[r];
        }
    }

    // to[t * 2 * kLanes + j] = row range.at + j times row t of x, rows of which are `ld` apart; in the
    // format's order if `fast`.
    static void dots(const Matrix& m, bool fast, const RowRange& range, const Bf16* x, int64_t ld,
                     int64_t tokens, float* to) {
        with_row(m, fast, [&](const auto& row, auto kind) {
            for_tiles<4>(
                m, range, tokens, [&](auto rows, auto some, int64_t n, int64_t t, const uint8_t* far) {
                    const Bf16* from = x + t * ld;
                    float* at = to + t * 2 * kLanes + n - range.at;
                    if constexpr (kind.value == Format::bf16)
                        // One after the other, as memory is read fastest: there is nothing to decode.
                        for (int r = 0; r < rows.value; ++r)
                            tile<Format::bf16, 1, some.value>(row, m, n + r, from, ld, nullptr, at + r);
                    else
                        tile<kind.value, rows.value, some.value>(row, m, n, from, ld, far, at);
                });
        });
    }
};
