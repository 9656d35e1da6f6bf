// 32 elements of a row of a stored matrix as 32 bfloat16 in one register: each the format's reference
// float32 value (generic/formats.inl, included before) rounded once to nearest even. The rounding is
// vcvtne2ps2bf16's, which flushes subnormals to zero, as the products that read the panel do.
//
// Formats with at most 32 different values per scale multiply a table of them and round it, then look
// the strip's elements up (vpermw), which costs less than converting every element. What counts is the
// number of operations on the two pipes that shuffle, then those on the two that multiply.

#define KT_INLINE __attribute__((always_inline)) inline

constexpr int64_t kPanelStep = 128;  // bytes

inline __m512i rounded(__m512 low, __m512 high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }

// A table for look_up: the first 16 values.
inline __m512i rounded(__m512 values) { return _mm512_castsi256_si512((__m256i)_mm512_cvtneps_pbh(values)); }

inline __m512i look_up(__m512i table, __m512i words) { return _mm512_permutexvar_epi16(words, table); }

inline __m128i load_16(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
inline __m256i load_32(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

// An IEEE half in every lane.
inline __m512 all_half(const uint8_t* p) { return _mm512_cvtph_ps(_mm256_set1_epi16(load_as<int16_t>(p))); }

// Four IEEE halves from 8 readable bytes, for `all` and `all_second`: fewer operations than all_half.
inline __m128 four_halves(const uint8_t* p) {
    return _mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
inline __m512 all(__m128 v) { return _mm512_broadcastss_ps(v); }
inline __m512 all_second(__m128 v) { return _mm512_broadcastss_ps(_mm_movehdup_ps(v)); }

// first, first + 1, ... first + 15
inline __m512 counting(int first) {
    const __m512i steps = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_cvtepi32_ps(_mm512_add_epi32(steps, _mm512_set1_epi32(first)));
}

inline __m512 scaled_int8(__m128i bytes, __m512 scale) {
    return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)), scale);
}

// The 32 nibbles of 16 bytes as words; the low nibble first in each byte ...
inline __m512i nibble_pairs(const uint8_t* p) {
    const __m512i bytes = _mm512_cvtepu8_epi32(load_16(p));
    // (bytes | bytes << 12) & 15 in each word
    return _mm512_ternarylogic_epi32(bytes, _mm512_slli_epi32(bytes, 12), _mm512_set1_epi16(15), 0xa8);
}
// ... or all low nibbles first, then in bits 4 to 7 of the low ones the high ones.
inline __m512i nibble_halves(const uint8_t* p) {
    const __m256i low = _mm256_cvtepu8_epi16(load_16(p));
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), _mm256_srli_epi16(low, 4), 1);
}
inline __m512i low_nibbles(__m512i words) { return _mm512_and_si512(words, _mm512_set1_epi16(15)); }

// ue8m0_to_float of every byte: read as one operand, where computing it takes the shuffling pipes.
struct Ue8m0Table {
    alignas(64) float of[256];

    constexpr Ue8m0Table() : of() {
        for (uint32_t e = 0; e < 256; ++e)
            of[e] = __builtin_bit_cast(float, e << 23 | (e == 0 || e == 255 ? 0x00400000u : 0u));
    }
};
constexpr Ue8m0Table kUe8m0;

// x / size by a multiplication, exact where x * size < 2^32 (at most 2^20 rows and columns, blocks of fewer
// than 2^12 rows); 0 where size >= limit, more than any x.
struct Divider {
    uint64_t inverse;

    Divider(int64_t size, int64_t limit)
        : inverse(size >= limit ? 0
                                : ((uint64_t{1} << 32) + static_cast<uint64_t>(size) - 1) /
                                      static_cast<uint64_t>(size)) {}
    int64_t operator()(int64_t x) const {
        return static_cast<int64_t>(static_cast<uint64_t>(x) * inverse >> 32);
    }
};

// Scales that lie apart from the elements.
struct StripScales {
    const uint8_t* at;
    int64_t row_bytes;
    Divider rows, strips;
    ScaleType type;
    int64_t size;

    explicit StripScales(const Matrix& m)
        : at(m.scales),
          row_bytes(m.scale_row_bytes),
          rows(m.block_rows, m.rows),
          strips(m.block_cols / kStrip, m.block_cols >= m.cols ? 0 : pieces(m.cols, kStrip)),
          type(m.scale_type),
          size(scale_size(type)) {}

    // In blocks of rows, or each row its own.
    const uint8_t* of_block(int64_t n, int64_t k) const {
        return at + rows(n) * row_bytes + strips(k / kStrip) * size;
    }
    const uint8_t* of_row(int64_t n, int64_t k) const {
        return at + n * row_bytes + strips(k / kStrip) * size;
    }

    // The scale at p in every lane.
    __m512 operator()(const uint8_t* p) const {
        switch (type) {
            case ScaleType::f32:
                return _mm512_set1_ps(load_as<float>(p));
            case ScaleType::bf16:
                return (__m512)_mm512_and_si512(_mm512_set1_epi16(load_as<int16_t>(p)),
                                                _mm512_set1_epi32(static_cast<int32_t>(0xffff0000)));
            case ScaleType::f16:
                return all_half(p);
            default:
                return _mm512_set1_ps(kUe8m0.of[*p]);
        }
    }
};

// Up to 16 scales as floats.
inline __m512 scales_16(ScaleType type, const uint8_t* p, __mmask16 some) {
    switch (type) {
        case ScaleType::f32:
            return _mm512_maskz_loadu_ps(some, p);
        case ScaleType::bf16:
            return _mm512_castsi512_ps(
                _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, p)), 16));
        case ScaleType::f16:
            return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(some, p));
        default: {  // ue8m0_to_float
            const __m512i e = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(some, p));
            const __m512i next =
                _mm512_and_si512(_mm512_add_epi32(e, _mm512_set1_epi32(1)), _mm512_set1_epi32(255));
            const __m512i bits = _mm512_slli_epi32(e, 23);
            return _mm512_castsi512_ps(
                _mm512_mask_or_epi32(bits, _mm512_cmplt_epu32_mask(next, _mm512_set1_epi32(2)), bits,
                                     _mm512_set1_epi32(0x00400000)));
        }
    }
}

// 8 strips of rows one after the other.
template <class Strip>
KT_INLINE void eight_strips(const Strip& strip, int64_t n, int64_t k, __m512i (&a)[8]) {
    if constexpr (requires { strip.bf16(strip.data, strip.data); }) {
        const uint8_t *p = strip.at(n, k), *scale = strip.scales.of_row(n, k);
        for (int i = 0; i < 8; ++i, p += strip.row_bytes, scale += strip.scales.row_bytes)
            a[i] = strip.bf16(p, scale);
    } else {
        for (int i = 0; i < 8; ++i) a[i] = strip.bf16(n + i, k);
    }
}

// One for each format: bf16(n, k) decodes W[n][k .. k + 32), which lies inside the row-major matrix.
template <Format F>
struct Strip;

template <>
struct Strip<Format::bf16> {
    const uint8_t* data;
    int64_t row_bytes;

    explicit Strip(const Matrix& m) : data(m.data), row_bytes(m.row_bytes) {}
    KT_INLINE __m512i bf16(int64_t n, int64_t k) const {
        return _mm512_loadu_si512(data + n * row_bytes + 2 * k);
    }
};

template <>
struct Strip<Format::f32> {
    const uint8_t* data;
    int64_t row_bytes;

    explicit Strip(const Matrix& m) : data(m.data), row_bytes(m.row_bytes) {}
    KT_INLINE __m512i bf16(int64_t n, int64_t k) const {
        const uint8_t* p = data + n * row_bytes + 4 * k;
        return rounded(_mm512_loadu_ps(p), _mm512_loadu_ps(p + 64));
    }
};

// Which bytes of two registers to take, or of one.
struct Bytes {
    alignas(64) uint8_t of[64];
};
constexpr Bytes kEvenBytes = [] {
    Bytes bytes{};
    for (int i = 0; i < 64; ++i) bytes.of[i] = static_cast<uint8_t>(2 * i);
    return bytes;
}();
// Columns 4 L to 4 L + 3 of two depths, then the columns 16 further, in lane L.
constexpr Bytes kColumnPairs = [] {
    Bytes bytes{};
    for (int i = 0; i < 64; ++i)
        bytes.of[i] = static_cast<uint8_t>(i / 16 * 4 + i % 8 / 2 + i / 8 % 2 * 16 + i % 2 * 64);
    return bytes;
}();

// Words 0, 16, 1, 17, ...
KT_INLINE __m512i interleaved(__m512i v) {
    const __m512i steps = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_permutexvar_epi16(
        _mm512_add_epi32(_mm512_mullo_epi32(steps, _mm512_set1_epi32(0x10001)), _mm512_set1_epi32(16 << 16)),
        v);
}

// Of 8 rows, 32 bytes: 16 of this one and of the fourth after it, then the other 16.
KT_INLINE __m512i load_two(const uint8_t* from, int64_t row_bytes) {
    const __m512i two =
        _mm512_inserti64x4(_mm512_castsi256_si512(load_32(from)), load_32(from + 4 * row_bytes), 1);
    return _mm512_shuffle_i64x2(two, two, 0xd8);
}
// A pair of depths of 8 rows, and that of 16 depths further.
KT_INLINE void store_pairs(__m512i pairs, char* to) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_castsi512_si256(pairs));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 8 * kPanelStep), _mm512_extracti64x4_epi64(pairs, 1));
}

// 128 words by their lower and upper bytes.
struct WordBytes {
    alignas(64) uint8_t lower[128], upper[128];

    explicit constexpr WordBytes(uint32_t (*word)(uint32_t)) : lower(), upper() {
        for (uint32_t i = 0; i < 128; ++i) {
            lower[i] = static_cast<uint8_t>(word(i));
            upper[i] = static_cast<uint8_t>(word(i) >> 8);
        }
    }
};

// One look-up of 128 each.
struct ByteTables {
    __m512i lower[2], upper[2];

    ByteTables() = default;
    explicit ByteTables(const WordBytes& bytes) {
        for (int i = 0; i < 2; ++i) {
            lower[i] = _mm512_load_si512(bytes.lower + 64 * i);
            upper[i] = _mm512_load_si512(bytes.upper + 64 * i);
        }
    }
    explicit ByteTables(const __m512i (&words)[4]) {
        const __m512i even = _mm512_load_si512(kEvenBytes.of),
                      odd = _mm512_or_si512(even, _mm512_set1_epi8(1));
        for (int i = 0; i < 2; ++i) {
            lower[i] = _mm512_permutex2var_epi8(words[2 * i], even, words[2 * i + 1]);
            upper[i] = _mm512_permutex2var_epi8(words[2 * i], odd, words[2 * i + 1]);
        }
    }
    // Of every byte, without its sign ...
    KT_INLINE __m512i lower_of(__m512i bytes) const {
        return _mm512_permutex2var_epi8(lower[0], bytes, lower[1]);
    }
    // ... and with it: a table may hold negative words.
    KT_INLINE __m512i upper_of(__m512i bytes) const {
        return _mm512_ternarylogic_epi32(_mm512_permutex2var_epi8(upper[0], bytes, upper[1]), bytes,
                                         _mm512_set1_epi8(-128), 0x78);
    }
    // Of the first 8 bytes of every lane, and of the other 8.
    struct Words {
        __m512i first, second;
    };
    // `marks` are set in the lower bytes.
    KT_INLINE Words words(__m512i bytes, __m512i marks = _mm512_setzero_si512()) const {
        const __m512i low = _mm512_or_si512(lower_of(bytes), marks), high = upper_of(bytes);
        return {_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)};
    }
};

// E4M3's magnitudes as bfloat16.
constexpr WordBytes kFp8Words([](uint32_t v) { return __builtin_bit_cast(uint32_t, kFp8.of[v]) >> 16; });
// E4M3's magnitudes apart: the exponent, counted from the smallest one, where bfloat16 has it; in the lowest
// bits those of the mantissa. Zero is 32, NaN is 33.
constexpr WordBytes kFp8Parts([](uint32_t v) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, kFp8.of[v]);
    return v == 0 ? 32 : v == 127 ? 33 : ((bits >> 23) - 118) << 7 | (bits >> 20 & 7);
});

// Of E4M3's magnitudes times a scale.
inline ByteTables fp8_tables(__m512 scale) {
    __m512i words[4];
    for (int i = 0; i < 4; ++i)
        words[i] = rounded(_mm512_mul_ps(_mm512_load_ps(kFp8.of + 32 * i), scale),
                           _mm512_mul_ps(_mm512_load_ps(kFp8.of + 32 * i + 16), scale));
    return ByteTables(words);
}

// E4M3: the 128 magnitudes are a table. Where a scale covers many rows, they are multiplied by it and
// rounded, until the scale changes; where it does not, the looked up values are, two registers of them.
template <>
struct Strip<Format::fp8> {
    const uint8_t* data;
    int64_t row_bytes;
    StripScales scales;
    bool blocks, wide;
    mutable const uint8_t* table_of = nullptr;  // the scale in the table
    mutable ByteTables table;

    explicit Strip(const Matrix& m)
        : data(m.data),
          row_bytes(m.row_bytes),
          scales(m),
          blocks(m.block_rows >= 8),
          wide(blocks && (m.block_rows % 8 == 0 || m.block_rows >= m.rows)) {
        if (!blocks) table = ByteTables(kFp8Words);
    }

    KT_INLINE __m512i bf16(int64_t n, int64_t k) const {
        const __m512i words = _mm512_cvtepu8_epi16(load_32(data + n * row_bytes + k));
        const uint8_t* scale = scales.of_block(n, k);
        if (blocks) take(scale);
        const __m512i v = _mm512_mask_blend_epi8(0xaaaaaaaaaaaaaaaau, table.lower_of(words),
                                                 table.upper_of(_mm512_slli_epi16(words, 8)));
        if (blocks) return v;
        const __m512 s = scales(scale);
        const __m512 even = (__m512)_mm512_slli_epi32(v, 16);
        const __m512 odd = (__m512)_mm512_and_si512(v, _mm512_set1_epi32(static_cast<int32_t>(0xffff0000)));
        return interleaved(rounded(_mm512_mul_ps(even, s), _mm512_mul_ps(odd, s)));
    }

    // 8 rows by 32 depths into a panel; false: it takes single strips ...
    KT_INLINE bool rows(int64_t n, int64_t k, char* to) const {
        if (!wide) return false;
        take(scales.of_block(n, k));
        quads_of_rows(n, k, to, [&](__m512i a, __m512i b, char* at) __attribute__((always_inline)) {
            const auto half = [&](__m512i bytes, char* here) __attribute__((always_inline)) {
                const ByteTables::Words v = table.words(bytes);
                store_pairs(v.first, here);
                store_pairs(v.second, here + kPanelStep);
            };
            half(_mm512_unpacklo_epi32(a, b), at);
            half(_mm512_unpackhi_epi32(a, b), at + 2 * kPanelStep);
        });
        return true;
    }
    // ... or 8 depths by 32 columns.
    KT_INLINE bool depths(int64_t n, int64_t k, char* to) const {
        if (!wide) return false;
        take(scales.of_block(n, k));
        pairs_of_depths(
            n, k, to, [&](int, __m512i bytes) __attribute__((always_inline)) { return table.words(bytes); });
        return true;
    }

  protected:
    // use(a, b, to) with pairs of depths of rows 0, 1 and 4, 5, and of rows 2, 3 and 6, 7: 4 of depths 0 to 7
    // and of 16 to 23, then of the other depths.
    template <class Use>
    KT_INLINE void quads_of_rows(int64_t n, int64_t k, char* to, const Use& use) const {
        const uint8_t* from = data + n * row_bytes + k;
        const __m512i r0 = load_two(from, row_bytes), r1 = load_two(from + row_bytes, row_bytes);
        const __m512i r2 = load_two(from + 2 * row_bytes, row_bytes);
        const __m512i r3 = load_two(from + 3 * row_bytes, row_bytes);
        use(_mm512_unpacklo_epi16(r0, r1), _mm512_unpacklo_epi16(r2, r3), to);
        use(_mm512_unpackhi_epi16(r0, r1), _mm512_unpackhi_epi16(r2, r3), to + 4 * kPanelStep);
    }
    // Stores the words that words(i, bytes) makes of the i-th pair of depths.
    template <class Words>
    KT_INLINE void pairs_of_depths(int64_t n, int64_t k, char* to, const Words& words) const {
        const uint8_t* from = data + n * row_bytes + k;
        const __m512i order = _mm512_load_si512(kColumnPairs.of);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i, from += 2 * row_bytes, to += kPanelStep) {
            const ByteTables::Words v =
                words(i, _mm512_permutex2var_epi8(_mm512_castsi256_si512(load_32(from)), order,
                                                  _mm512_castsi256_si512(load_32(from + row_bytes))));
            _mm512_storeu_si512(to, v.first);
            _mm512_storeu_si512(to + 64, v.second);
        }
    }

  private:
    KT_INLINE void take(const uint8_t* scale) const {
        if (scale == table_of) [[likely]]
            return;
        table_of = scale;
        table = fp8_tables(scales(scale));
    }
};

// The 8 mantissas of E4M3 times the scales of four rows, rounded. With exponents added as integers these are
// all products, if none of them leaves bfloat16's normal numbers.
struct ScaledMantissas {
    __m512i of_rows;  // less their own indices

    // Rows a, a + 1, b and b + 1 of 8 scales.
    KT_INLINE void take(__m512 scales, int a, int b) {
        const __m512 mantissas = _mm512_setr_ps(8, 9, 10, 11, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15);
        const auto two = [&](int row) __attribute__((always_inline)) {
            const __m512i first = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
            const __m512i rows = _mm512_add_epi32(first, _mm512_set1_epi32(row));
            return _mm512_mul_ps(_mm512_mul_ps(mantissas, _mm512_set1_ps(0x1p-12f)),
                                 _mm512_permutexvar_ps(rows, scales));
        };
        of_rows = _mm512_sub_epi16(rounded(two(a), two(b)), _mm512_load_si512(kIndices.of));
    }
    // Of words of kFp8Parts, which have in bits 3 and 4 which of the rows they are of.
    KT_INLINE __m512i times(__m512i words) const {
        return _mm512_add_epi16(_mm512_permutex2var_epi16(of_rows, words, _mm512_load_si512(kZeroOrNan.of)),
                                words);
    }
    // Whether 8 scales are such, positive and between 2^-117 and 2^119.
    KT_INLINE static bool fit(__m512 scales) {
        const __m512i over = _mm512_sub_epi32((__m512i)scales, _mm512_set1_epi32(10 << 23));
        return static_cast<uint8_t>(_mm512_cmplt_epu32_mask(over, _mm512_set1_epi32(236 << 23))) == 0xff;
    }

  private:
    struct Words {
        alignas(64) uint16_t of[32];
    };
    static constexpr Words kIndices = [] {
        Words words{};
        for (int i = 0; i < 32; ++i) words.of[i] = static_cast<uint16_t>(i);
        return words;
    }();
    static constexpr Words kZeroOrNan = [] {
        Words words{};
        for (int i = 0; i < 32; ++i) words.of[i] = static_cast<uint16_t>((i % 8 == 0 ? 0 : 0x7fc0) - 32 - i);
        return words;
    }();
};

// E4M3 with a scale for each row: along rows, those of 16 rows are multiplied once. A decoder of its own,
// since beside that of blocks in one function both became slower.
struct Fp8RowStrip : Strip<Format::fp8> {
    ByteTables parts{kFp8Parts};
    mutable struct {
        const uint8_t* of = nullptr;
        ScaledMantissas four[2];
    } eight[2];  // of the last 8 rows, and of those before

    using Strip::Strip;
    static bool fits(const Matrix& m) { return m.block_rows == 1; }

    // n is a multiple of 8.
    KT_INLINE bool rows(int64_t n, int64_t k, char* to) const {
        auto& own = eight[n / 8 % 2];
        if (const uint8_t* at = scales.of_row(n, k); at != own.of) [[unlikely]] {
            const __m512 s = scales_8(at);
            if (!ScaledMantissas::fit(s)) return false;
            own.of = at;
            own.four[0].take(s, 0, 4);
            own.four[1].take(s, 2, 6);
        }
        const __m512i marks = _mm512_or_si512(_mm512_set1_epi64(0x0808000008080000),
                                              _mm512_maskz_set1_epi32(0xf0f0, 0x10101010));
        quads_of_rows(n, k, to, [&](__m512i a, __m512i b, char* at) __attribute__((always_inline)) {
            const ByteTables::Words v = parts.words(a, marks), w = parts.words(b, marks);
            const auto half = [&](__m512i of_a, __m512i of_b, char* here) __attribute__((always_inline)) {
                const __m512i x = own.four[0].times(of_a), y = own.four[1].times(of_b);
                store_pairs(_mm512_unpacklo_epi64(x, y), here);
                store_pairs(_mm512_unpackhi_epi64(x, y), here + kPanelStep);
            };
            half(v.first, w.first, at);
            half(v.second, w.second, at + 2 * kPanelStep);
        });
        return true;
    }
    KT_INLINE bool depths(int64_t n, int64_t k, char* to) const {
        const __m512 s = scales_8(scales.of_row(n, k));
        if (!ScaledMantissas::fit(s)) return false;
        ScaledMantissas four[2];
        four[0].take(s, 0, 2);
        four[1].take(s, 4, 6);
        pairs_of_depths(n, k, to, [&](int pair, __m512i bytes) __attribute__((always_inline)) {
            const __m512i marks = _mm512_set1_epi16(pair % 2 == 0 ? 0x0800 : 0x1810);
            const ByteTables::Words v = parts.words(bytes, marks);
            return ByteTables::Words{four[pair / 2].times(v.first), four[pair / 2].times(v.second)};
        });
        return true;
    }

  private:
    // Of 8 rows, from the first one's on.
    KT_INLINE __m512 scales_8(const uint8_t* p) const {
        if (scales.row_bytes == scales.size) [[likely]]
            return scales_16(scales.type, p, 0xff);
        float of[8];
        for (int i = 0; i < 8; ++i, p += scales.row_bytes) of[i] = scale_value(scales.type, p);
        return _mm512_castps256_ps512(_mm256_loadu_ps(of));
    }
};

template <>
struct Strip<Format::int8> {
    const uint8_t* data;
    int64_t row_bytes;
    StripScales scales;

    explicit Strip(const Matrix& m) : data(m.data), row_bytes(m.row_bytes), scales(m) {}
    KT_INLINE __m512i bf16(int64_t n, int64_t k) const { return bf16(at(n, k), scales.of_row(n, k)); }
    KT_INLINE const uint8_t* at(int64_t n, int64_t k) const { return data + n * row_bytes + k; }
    KT_INLINE __m512i bf16(const uint8_t* p, const uint8_t* scale) const {
        const __m512 s = scales(scale);
        return rounded(scaled_int8(load_16(p), s), scaled_int8(load_16(p + 16), s));
    }
};

inline __m512 e2m1_values() {
    return _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f,
                          -3.0f, -4.0f, -6.0f);
}

// MXFP4, INT4: 16 bytes of nibbles, scales apart.
template <Format F>
struct NibbleStrip {
    const uint8_t* data;
    int64_t row_bytes;
    StripScales scales;
    __m512 values;

    explicit NibbleStrip(const Matrix& m) : data(m.data), row_bytes(m.row_bytes), scales(m) {
        values = F == Format::mxfp4 ? e2m1_values() : counting(F == Format::int4 ? -8 : 0);
    }
    KT_INLINE __m512i bf16(int64_t n, int64_t k) const { return bf16(at(n, k), scales.of_row(n, k)); }
    KT_INLINE const uint8_t* at(int64_t n, int64_t k) const { return data + n * row_bytes + k / 2; }
    KT_INLINE __m512i bf16(const uint8_t* p, const uint8_t* scale) const {
        const __m512 s = F == Format::mxfp4 ? _mm512_set1_ps(kUe8m0.of[*scale]) : scales(scale);
        return look_up(rounded(_mm512_mul_ps(values, s)), nibble_pairs(p));
    }
};
template <>
struct Strip<Format::mxfp4> : NibbleStrip<Format::mxfp4> {
    using NibbleStrip::NibbleStrip;
};
template <>
struct Strip<Format::int4> : NibbleStrip<Format::int4> {
    using NibbleStrip::NibbleStrip;
};

template <>
struct Strip<Format::uint4> : NibbleStrip<Format::uint4> {
    int64_t zeros;  // bytes from a scale to its zero point

    explicit Strip(const Matrix& m) : NibbleStrip(m), zeros(zero_distance(m)) {}
    KT_INLINE __m512i bf16(int64_t n, int64_t k) const { return bf16(at(n, k), scales.of_row(n, k)); }
    KT_INLINE __m512i bf16(const uint8_t* p, const uint8_t* scale) const {
        const __m512 v = _mm512_mul_ps(_mm512_sub_ps(values, scales(scale + zeros)), scales(scale));
        return look_up(rounded(v), nibble_pairs(p));
    }
};

// The values of two scales are a table of 32.
template <>
struct Strip<Format::nvfp4> {
    const uint8_t* data;
    int64_t row_bytes;
    __m512 all, values = e2m1_values();
    __m512i second = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);

    explicit Strip(const Matrix& m)
        : data(m.data), row_bytes(m.row_bytes), all(_mm512_set1_ps(strip_scale(m, 0, 0))) {}
    KT_INLINE __m512i bf16(int64_t n, int64_t k) const {
        const uint8_t* p = data + n * row_bytes + k / kStrip * FormatTraits<Format::nvfp4>::kBytes;
        const auto scaled = [&](uint8_t scale) __attribute__((always_inline)) {
            return _mm512_mul_ps(values, _mm512_mul_ps(_mm512_set1_ps(kFp8.of[scale]), all));
        };
        return look_up(rounded(scaled(p[0]), scaled(p[1])), _mm512_or_si512(nibble_pairs(p + 2), second));
    }
};

#include "isa/avx512_strips_gguf.inl"
