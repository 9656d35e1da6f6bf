// 32 elements of a row of a stored matrix as 32 bfloat16 in one register: each the format's reference
// float32 value (generic/formats.inl, included before) rounded once to nearest even. The rounding is
// vcvtne2ps2bf16's, which flushes subnormals to zero, as the products that read the panel do.
//
// Formats with at most 32 different values per scale multiply a table of them and round it, then look
// the strip's elements up (vpermw), which costs less than converting every element.

inline __m512i rounded(__m512 low, __m512 high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }

// A table for look_up: the 16 values, rounded, twice, so that bit 4 of an index does not matter.
inline __m512i rounded_twice(__m512 values) {
    const __m256i half = (__m256i)_mm512_cvtneps_pbh(values);
    return _mm512_broadcast_i64x4(half);
}

inline __m512i look_up(__m512i table, __m512i words) { return _mm512_permutexvar_epi16(words, table); }

inline __m128i load_16(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
inline __m256i load_32(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

inline float load_half(const uint8_t* p) { return _cvtsh_ss(load_as<uint16_t>(p)); }

// first, first + 1, ... first + 15
inline __m512 counting(int first) {
    const __m512i steps = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_cvtepi32_ps(_mm512_add_epi32(steps, _mm512_set1_epi32(first)));
}

inline __m512 scaled_int8(__m128i bytes, __m512 scale) {
    return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)), scale);
}

// Words whose low 5 bits, up to bit 4, are the 32 nibbles of 16 bytes; low nibble first in each byte ...
inline __m512i nibble_pairs(const uint8_t* p) {
    const __m512i bytes = _mm512_cvtepu8_epi32(load_16(p));
    return _mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12));
}
// ... or all low nibbles first.
inline __m512i nibble_halves(const uint8_t* p) {
    const __m256i low = _mm256_cvtepu8_epi16(load_16(p));
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), _mm256_srli_epi16(low, 4), 1);
}

// x / size, by a shift where size is a power of two or no x reaches it.
struct Divider {
    uint32_t size;
    int shift;  // -1: division

    Divider(int64_t size, int64_t limit) : size(static_cast<uint32_t>(size)), shift(-1) {
        if (size >= limit)
            shift = 62;
        else if ((size & (size - 1)) == 0)
            shift = __builtin_ctzll(static_cast<uint64_t>(size));
    }
    int64_t operator()(int64_t x) const { return shift >= 0 ? x >> shift : static_cast<uint32_t>(x) / size; }
};

// Scales that lie apart from the elements.
struct StripScales {
    const uint8_t* at;
    int64_t row_bytes;
    Divider rows, cols;
    ScaleType type;
    int size_shift;

    explicit StripScales(const Matrix& m)
        : at(m.scales),
          row_bytes(m.scale_row_bytes),
          rows(m.block_rows, m.rows),
          cols(m.block_cols, m.cols),
          type(m.scale_type),
          size_shift(type == ScaleType::f32     ? 2
                     : type == ScaleType::ue8m0 ? 0
                                                : 1) {}

    float operator()(int64_t n, int64_t k) const {
        return scale_value(type, at + rows(n) * row_bytes + (cols(k) << size_shift));
    }
};

inline void prefetch_bytes(const uint8_t* p, int64_t bytes) {
    _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0);
    if ((reinterpret_cast<uintptr_t>(p) & 63) + static_cast<uint64_t>(bytes) > 64)
        _mm_prefetch(reinterpret_cast<const char*>(p + bytes - 1), _MM_HINT_T0);
}

// One for each format: bf16(n, k) decodes W[n][k .. k + 32), which lies inside the row-major matrix.
template <Format F>
struct Strip;

template <>
struct Strip<Format::bf16> {
    const uint8_t* data;
    int64_t row_bytes;

    explicit Strip(const Matrix& m) : data(m.data), row_bytes(m.row_bytes) {}
    __m512i bf16(int64_t n, int64_t k) const { return _mm512_loadu_si512(data + n * row_bytes + 2 * k); }
    static void prefetch(const Matrix& m, int64_t n, int64_t k) {
        prefetch_bytes(m.data + n * m.row_bytes + 2 * k, 64);
    }
};

template <>
struct Strip<Format::f32> {
    const uint8_t* data;
    int64_t row_bytes;

    explicit Strip(const Matrix& m) : data(m.data), row_bytes(m.row_bytes) {}
    __m512i bf16(int64_t n, int64_t k) const {
        const uint8_t* p = data + n * row_bytes + 4 * k;
        return rounded(_mm512_loadu_ps(p), _mm512_loadu_ps(p + 64));
    }
    static void prefetch(const Matrix& m, int64_t n, int64_t k) {
        const uint8_t* p = m.data + n * m.row_bytes + 4 * k;
        prefetch_bytes(p, 64);
        prefetch_bytes(p + 64, 64);
    }
};

// E4M3 becomes an IEEE half by shifts: 2^-8 of its value, subnormals included, and vcvtph2ps widens
// those whatever MXCSR says. Multiplied by 2^8 times the scale the product is that of the definition.
template <>
struct Strip<Format::fp8> {
    const uint8_t* data;
    int64_t row_bytes;
    StripScales scales;

    explicit Strip(const Matrix& m) : data(m.data), row_bytes(m.row_bytes), scales(m) {}
    __m512i bf16(int64_t n, int64_t k) const {
        const __m512i kept = _mm512_set1_epi16(static_cast<int16_t>(0xbf80)), nan = _mm512_set1_epi16(0x3f80);
        const __m512i bytes = _mm512_cvtepi8_epi16(load_32(data + n * row_bytes + k));
        __m512i half = _mm512_and_si512(_mm512_slli_epi16(bytes, 7), kept);
        const __mmask32 nans = _mm512_testn_epi16_mask(_mm512_add_epi16(half, _mm512_set1_epi16(0x80)), nan);
        half = _mm512_mask_mov_epi16(half, nans, _mm512_set1_epi16(0x7e00));
        __m512 low = _mm512_cvtph_ps(_mm512_castsi512_si256(half));
        __m512 high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1));
        float scale = scales(n, k);
        if (__builtin_fabsf(scale) < 0x1p119f) [[likely]] {
            scale *= 0x1p8f;
        } else {
            low = _mm512_mul_ps(low, _mm512_set1_ps(0x1p8f));
            high = _mm512_mul_ps(high, _mm512_set1_ps(0x1p8f));
        }
        const __m512 s = _mm512_set1_ps(scale);
        return rounded(_mm512_mul_ps(low, s), _mm512_mul_ps(high, s));
    }
    static void prefetch(const Matrix& m, int64_t n, int64_t k) {
        prefetch_bytes(m.data + n * m.row_bytes + k, 32);
    }
};

template <>
struct Strip<Format::int8> {
    const uint8_t* data;
    int64_t row_bytes;
    StripScales scales;

    explicit Strip(const Matrix& m) : data(m.data), row_bytes(m.row_bytes), scales(m) {}
    __m512i bf16(int64_t n, int64_t k) const {
        const uint8_t* p = data + n * row_bytes + k;
        const __m512 scale = _mm512_set1_ps(scales(n, k));
        return rounded(scaled_int8(load_16(p), scale), scaled_int8(load_16(p + 16), scale));
    }
    static void prefetch(const Matrix& m, int64_t n, int64_t k) {
        prefetch_bytes(m.data + n * m.row_bytes + k, 32);
    }
};

// MXFP4, INT4: 16 bytes of nibbles, scales apart.
template <Format F>
struct NibbleStrip {
    const uint8_t* data;
    int64_t row_bytes;
    StripScales scales;
    __m512 values;

    explicit NibbleStrip(const Matrix& m) : data(m.data), row_bytes(m.row_bytes), scales(m) {
        values = F == Format::int4 ? counting(-8)
                                   : _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f,
                                                    -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
        if (F == Format::mxfp4)
            scales.type = ScaleType::ue8m0;  // the only one: lets the compiler drop the rest
    }
    __m512i bf16(int64_t n, int64_t k) const {
        const __m512 scale = _mm512_set1_ps(scales(n, k));
        return look_up(rounded_twice(_mm512_mul_ps(values, scale)),
                       nibble_pairs(data + n * row_bytes + k / 2));
    }
    static void prefetch(const Matrix& m, int64_t n, int64_t k) {
        prefetch_bytes(m.data + n * m.row_bytes + k / 2, 16);
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

// GGUF: blocks that hold their scales.
template <Format F>
struct GgufStrip {
    const uint8_t* data;
    int64_t row_bytes;

    explicit GgufStrip(const Matrix& m) : data(m.data), row_bytes(m.row_bytes) {}

    const uint8_t* block(int64_t n, int64_t k) const {
        constexpr uint64_t elements = block_elements<F>();
        return data + n * row_bytes +
               static_cast<int64_t>(static_cast<uint64_t>(k) / elements) * block_bytes<F>();
    }
    // The strip's share of its block, by place: of a K-quant's parts the larger one.
    static void prefetch(const Matrix& m, int64_t n, int64_t k) {
        constexpr int64_t share = block_bytes<F>() * kStrip / block_elements<F>();
        const int64_t strip = k % block_elements<F>() / kStrip;
        prefetch_bytes(block_at<F>(m, n, k) + strip * share, share + 1);
    }
};

template <>
struct Strip<Format::q8_0> : GgufStrip<Format::q8_0> {
    using GgufStrip::GgufStrip;
    __m512i bf16(int64_t n, int64_t k) const {
        const uint8_t* p = block(n, k);
        const __m512 d = _mm512_set1_ps(load_half(p));
        return rounded(scaled_int8(load_16(p + 2), d), scaled_int8(load_16(p + 18), d));
    }
};

template <>
struct Strip<Format::q4_0> : GgufStrip<Format::q4_0> {
    __m512 values = counting(-8);

    using GgufStrip::GgufStrip;
    __m512i bf16(int64_t n, int64_t k) const {
        const uint8_t* p = block(n, k);
        const __m512 d = _mm512_set1_ps(load_half(p));
        return look_up(rounded_twice(_mm512_mul_ps(values, d)), nibble_halves(p + 2));
    }
};

// Indices of 5 bits: nibbles, and the high bits of 32 elements in order.
inline __m512i with_high_bits(__m512i nibbles, __mmask32 high) {
    const __m512i low = _mm512_and_si512(nibbles, _mm512_set1_epi16(15));
    return _mm512_mask_add_epi16(low, high, low, _mm512_set1_epi16(16));
}

template <>
struct Strip<Format::q5_0> : GgufStrip<Format::q5_0> {
    __m512 low = counting(-16), high = counting(0);

    using GgufStrip::GgufStrip;
    __m512i bf16(int64_t n, int64_t k) const {
        const uint8_t* p = block(n, k);
        const __m512 d = _mm512_set1_ps(load_half(p));
        return look_up(rounded(_mm512_mul_ps(low, d), _mm512_mul_ps(high, d)),
                       with_high_bits(nibble_halves(p + 6), load_as<uint32_t>(p + 2)));
    }
};

template <>
struct Strip<Format::q5_1> : GgufStrip<Format::q5_1> {
    __m512 low = counting(0), high = counting(16);

    using GgufStrip::GgufStrip;
    __m512i bf16(int64_t n, int64_t k) const {
        const uint8_t* p = block(n, k);
        const __m512 d = _mm512_set1_ps(load_half(p)), min = _mm512_set1_ps(load_half(p + 2));
        const __m512i table =
            rounded(_mm512_add_ps(_mm512_mul_ps(low, d), min), _mm512_add_ps(_mm512_mul_ps(high, d), min));
        return look_up(table, with_high_bits(nibble_halves(p + 8), load_as<uint32_t>(p + 4)));
    }
};

// d * scale and d_min * min of a sub-block, in lanes 0 and 1.
inline __m128 k_scales(const uint8_t* block, int64_t sub) {
    const ScaleMin s = k_scale_min(block + 4, sub);
    const __m128 d = _mm_cvtph_ps(_mm_cvtsi32_si128(load_as<int32_t>(block)));
    return _mm_mul_ps(d, _mm_setr_ps(s.scale, s.min, 0.0f, 0.0f));
}

// Words with the nibbles of 32 bytes in bits 0 to 3, those of an even sub-block or an odd one; and more.
inline __m512i k_nibbles(const uint8_t* p, int64_t sub) {
    return _mm512_srl_epi16(_mm512_cvtepu8_epi16(load_32(p)),
                            _mm_cvtsi32_si128(static_cast<int>(sub & 1) * 4));
}

template <>
struct Strip<Format::q4_k> : GgufStrip<Format::q4_k> {
    __m512 values = counting(0);

    using GgufStrip::GgufStrip;
    __m512i bf16(int64_t n, int64_t k) const {
        const uint8_t* p = block(n, k);
        const int64_t sub = k >> 5 & 7;
        const __m128 scales = k_scales(p, sub);
        const __m512 d = _mm512_broadcastss_ps(scales), min = _mm512_broadcastss_ps(_mm_movehdup_ps(scales));
        return look_up(rounded_twice(_mm512_sub_ps(_mm512_mul_ps(values, d), min)),
                       k_nibbles(p + 16 + sub / 2 * kStrip, sub));
    }
};

template <>
struct Strip<Format::q5_k> : GgufStrip<Format::q5_k> {
    __m512 low = counting(0), high = counting(16);

    using GgufStrip::GgufStrip;
    __m512i bf16(int64_t n, int64_t k) const {
        const uint8_t* p = block(n, k);
        const int64_t sub = k >> 5 & 7;
        const __m128 scales = k_scales(p, sub);
        const __m512 d = _mm512_broadcastss_ps(scales), min = _mm512_broadcastss_ps(_mm_movehdup_ps(scales));
        const __m512i table =
            rounded(_mm512_sub_ps(_mm512_mul_ps(low, d), min), _mm512_sub_ps(_mm512_mul_ps(high, d), min));
        const __m256i bit = _mm256_set1_epi8(static_cast<char>(1 << sub));
        return look_up(table, with_high_bits(k_nibbles(p + 48 + sub / 2 * kStrip, sub),
                                             _mm256_test_epi8_mask(load_32(p + 16), bit)));
    }
};

// Two scales per strip and 64 values: converted element by element.
template <>
struct Strip<Format::q6_k> : GgufStrip<Format::q6_k> {
    using GgufStrip::GgufStrip;
    __m512i bf16(int64_t n, int64_t k) const {
        const uint8_t* p = block(n, k);
        const int64_t half = k >> 7 & 1, s = k >> 5 & 3;
        const __m256i low = _mm256_srl_epi16(load_32(p + half * 64 + (s & 1) * kStrip),
                                             _mm_cvtsi32_si128(static_cast<int>(s & 2) * 2));
        // Rotated to bits 4 and 5: up by 4 for s = 0, 2 for s = 1, down by 0 and 2 for the others.
        const __m256i pairs =
            _mm256_rolv_epi32(load_32(p + 128 + half * 32), _mm256_set1_epi32(static_cast<int>(4 - 2 * s)));
        const __m256i nibble = _mm256_set1_epi8(15);
        // nibble ? low : (pairs & 0x30)
        const __m256i q =
            _mm256_ternarylogic_epi32(nibble, low, _mm256_and_si256(pairs, _mm256_set1_epi8(0x30)), 0xca);
        const __m256i v = _mm256_sub_epi8(q, _mm256_set1_epi8(32));
        const __m128i scales =
            _mm_cvtepi8_epi32(_mm_cvtsi32_si128(load_as<uint16_t>(p + 192 + half * 8 + s * 2)));
        const __m128 d = _mm_mul_ps(_mm_set1_ps(load_half(p + 208)), _mm_cvtepi32_ps(scales));
        return rounded(
            scaled_int8(_mm256_castsi256_si128(v), _mm512_broadcastss_ps(d)),
            scaled_int8(_mm256_extracti128_si256(v, 1), _mm512_broadcastss_ps(_mm_movehdup_ps(d))));
    }
};
