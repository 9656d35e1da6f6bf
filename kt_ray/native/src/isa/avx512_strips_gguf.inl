// Strips of GGUF's block types; included by avx512_strips.inl.

// Blocks that hold their scales.
template <Format F>
struct GgufStrip {
    const uint8_t* data;
    int64_t row_bytes;

    explicit GgufStrip(const Matrix& m) : data(m.data), row_bytes(m.row_bytes) {}

    const uint8_t* block(int64_t n, int64_t k) const {
        constexpr uint64_t elements = FormatTraits<F>::kElements;
        return data + n * row_bytes +
               static_cast<int64_t>(static_cast<uint64_t>(k) / elements) * FormatTraits<F>::kBytes;
    }
};

template <>
struct Strip<Format::q8_0> : GgufStrip<Format::q8_0> {
    using GgufStrip::GgufStrip;
    __attribute__((always_inline)) __m512i bf16(int64_t n, int64_t k) const {
        const uint8_t* p = block(n, k);
        const __m512 d = all(four_halves(p));
        return rounded(scaled_int8(load_16(p + 2), d), scaled_int8(load_16(p + 18), d));
    }
};

template <>
struct Strip<Format::q4_0> : GgufStrip<Format::q4_0> {
    __m512 values = counting(-8);

    using GgufStrip::GgufStrip;
    __attribute__((always_inline)) __m512i bf16(int64_t n, int64_t k) const {
        const uint8_t* p = block(n, k);
        const __m512 d = all(four_halves(p));
        return look_up(rounded(_mm512_mul_ps(values, d)), low_nibbles(nibble_halves(p + 2)));
    }
};

// Indices of 5 bits: nibbles, and the high bits of 32 elements in order.
inline __m512i with_high_bits(__m512i nibbles, __mmask32 high) {
    const __m512i low = low_nibbles(nibbles);
    return _mm512_mask_add_epi16(low, high, low, _mm512_set1_epi16(16));
}

template <>
struct Strip<Format::q5_0> : GgufStrip<Format::q5_0> {
    __m512 low = counting(-16), high = counting(0);

    using GgufStrip::GgufStrip;
    __attribute__((always_inline)) __m512i bf16(int64_t n, int64_t k) const {
        const uint8_t* p = block(n, k);
        const __m512 d = all(four_halves(p));
        return look_up(rounded(_mm512_mul_ps(low, d), _mm512_mul_ps(high, d)),
                       with_high_bits(nibble_halves(p + 6), load_as<uint32_t>(p + 2)));
    }
};

template <>
struct Strip<Format::q5_1> : GgufStrip<Format::q5_1> {
    __m512 low = counting(0), high = counting(16);

    using GgufStrip::GgufStrip;
    __attribute__((always_inline)) __m512i bf16(int64_t n, int64_t k) const {
        const uint8_t* p = block(n, k);
        const __m128 halves = four_halves(p);
        const __m512 d = all(halves), min = all_second(halves);
        const __m512i table =
            rounded(_mm512_add_ps(_mm512_mul_ps(low, d), min), _mm512_add_ps(_mm512_mul_ps(high, d), min));
        return look_up(table, with_high_bits(nibble_halves(p + 8), load_as<uint32_t>(p + 4)));
    }
};

// d * scale and d_min * min of a sub-block, in lanes 0 and 1.
inline __m128 k_scales(const uint8_t* block, int64_t sub) {
    const __m128i both = _mm_cvtsi32_si128(static_cast<int>(k_scale_min_bits(block + 4, sub)));
    return _mm_mul_ps(four_halves(block), _mm_cvtepi32_ps(_mm_cvtepu16_epi32(both)));
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
    __attribute__((always_inline)) __m512i bf16(int64_t n, int64_t k) const {
        const uint8_t* p = block(n, k);
        const int64_t sub = k >> 5 & 7;
        const __m128 scales = k_scales(p, sub);
        const __m512 d = all(scales), min = all_second(scales);
        return look_up(rounded(_mm512_sub_ps(_mm512_mul_ps(values, d), min)),
                       low_nibbles(k_nibbles(p + 16 + sub / 2 * kStrip, sub)));
    }
};

template <>
struct Strip<Format::q5_k> : GgufStrip<Format::q5_k> {
    __m512 low = counting(0), high = counting(16);

    using GgufStrip::GgufStrip;
    __attribute__((always_inline)) __m512i bf16(int64_t n, int64_t k) const {
        const uint8_t* p = block(n, k);
        const int64_t sub = k >> 5 & 7;
        const __m128 scales = k_scales(p, sub);
        const __m512 d = all(scales), min = all_second(scales);
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
    __attribute__((always_inline)) __m512i bf16(int64_t n, int64_t k) const {
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
        const __m128 d =
            _mm_mul_ps(_mm_cvtph_ps(_mm_set1_epi16(load_as<int16_t>(p + 208))), _mm_cvtepi32_ps(scales));
        return rounded(scaled_int8(_mm256_castsi256_si128(v), all(d)),
                       scaled_int8(_mm256_extracti128_si256(v, 1), all_second(d)));
    }
};
