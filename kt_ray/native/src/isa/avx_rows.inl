// Strips as vectors of floats (generic/rows.inl) for AVX2 and AVX-512: the same values as generic/formats.inl
// gives, for the formats that are most often met.

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

// Scales along a row, one strip after the other.
struct RunningScale {
    const uint8_t* next;
    ScaleType type;
    int64_t columns, left = 0;
    float scale = 0.0f;

    RunningScale(const Matrix& m, int64_t n)
        : next(m.scales + n / m.block_rows * m.scale_row_bytes), type(m.scale_type), columns(m.block_cols) {}
    float of_strip() {
        if (left <= 0) {
            scale = scale_value(type, next);
            next += scale_size(type);
            left = columns;
        }
        left -= kStrip;
        return scale;
    }
};

inline __m128i bytes_at(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }

// 32 signed bytes times a scale.
inline void scaled_bytes(__m128i low, __m128i high, float scale, Vec (&w)[kStripVectors]) {
    if constexpr (kLanes == 16) {
        w[0] = vset1(scale) * widened(low);
        w[1] = vset1(scale) * widened(high);
    } else {
        w[0] = vset1(scale) * widened(low);
        w[1] = vset1(scale) * widened(_mm_srli_si128(low, 8));
        w[2] = vset1(scale) * widened(high);
        w[3] = vset1(scale) * widened(_mm_srli_si128(high, 8));
    }
}

template <>
struct VectorStrip<Format::int8> {
    const uint8_t* p;
    RunningScale scales;

    VectorStrip(const Matrix& m, int64_t n) : p(m.data + n * m.row_bytes), scales(m, n) {}
    void operator()(int64_t k, Vec (&w)[kStripVectors]) {
        scaled_bytes(bytes_at(p + k), bytes_at(p + k + 16), scales.of_strip(), w);
    }
};

// E4M3 is an IEEE half without the upper bit of its exponent, times 2^8; subnormals are one's, too.
template <>
struct VectorStrip<Format::fp8> {
    const uint8_t* p;
    RunningScale scales;

    VectorStrip(const Matrix& m, int64_t n) : p(m.data + n * m.row_bytes), scales(m, n) {}
    void operator()(int64_t k, Vec (&w)[kStripVectors]) {
        const float scale = scales.of_strip();
        for (int64_t h = 0; h < 2; ++h) {
            const __m256i words = _mm256_cvtepi8_epi16(bytes_at(p + k + 16 * h));
            const __m256i half = _mm256_and_si256(_mm256_slli_epi16(words, 7),
                                                  _mm256_set1_epi16(static_cast<int16_t>(0xbfff)));
            const __m256i magnitude = _mm256_and_si256(half, _mm256_set1_epi16(0x7fff));
            const __m256i nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7f << 7));
            const __m256i all = _mm256_or_si256(half, nan);
            for (int64_t v = 0; v < 16 / kLanes; ++v)
                w[h * (16 / kLanes) + v] = halves(all, v) * 256.0f * scale;
        }
    }
};

template <>
struct VectorStrip<Format::q8_0> {
    const uint8_t* p;

    VectorStrip(const Matrix& m, int64_t n) : p(m.data + n * m.row_bytes) {}
    void operator()(int64_t k, Vec (&w)[kStripVectors]) const {
        const uint8_t* block = p + k / kStrip * 34;
        const __m128 d = _mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(block)));
        scaled_bytes(bytes_at(block + 2), bytes_at(block + 18), d[0], w);
    }
};

// The nibbles of 16 bytes, low first, as bytes.
inline void split_nibbles(const uint8_t* p, __m128i* low, __m128i* high) {
    const __m128i bytes = bytes_at(p), mask = _mm_set1_epi8(15);
    const __m128i even = _mm_and_si128(bytes, mask), odd = _mm_and_si128(_mm_srli_epi16(bytes, 4), mask);
    *low = _mm_unpacklo_epi8(even, odd);
    *high = _mm_unpackhi_epi8(even, odd);
}

template <>
struct VectorStrip<Format::int4> {
    const uint8_t* p;
    RunningScale scales;

    VectorStrip(const Matrix& m, int64_t n) : p(m.data + n * m.row_bytes), scales(m, n) {}
    void operator()(int64_t k, Vec (&w)[kStripVectors]) {
        __m128i low, high;
        split_nibbles(p + k / 2, &low, &high);
        const __m128i middle = _mm_set1_epi8(8);
        scaled_bytes(_mm_sub_epi8(low, middle), _mm_sub_epi8(high, middle), scales.of_strip(), w);
    }
};

// Twice the values are integers.
template <>
struct VectorStrip<Format::mxfp4> {
    const uint8_t* p;
    RunningScale scales;

    VectorStrip(const Matrix& m, int64_t n) : p(m.data + n * m.row_bytes), scales(m, n) {}
    void operator()(int64_t k, Vec (&w)[kStripVectors]) {
        const __m128i twice = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
        __m128i low, high;
        split_nibbles(p + k / 2, &low, &high);
        scaled_bytes(_mm_shuffle_epi8(twice, low), _mm_shuffle_epi8(twice, high), 0.5f * scales.of_strip(),
                     w);
    }
};

template <>
struct VectorStrip<Format::q4_k> {
    const uint8_t* p;

    VectorStrip(const Matrix& m, int64_t n) : p(m.data + n * m.row_bytes) {}
    void operator()(int64_t k, Vec (&w)[kStripVectors]) const {
        const uint8_t* block = p + k / 256 * 144;
        const int64_t sub = k / kStrip % 8;
        const uint32_t s = k_scale_min_bits(block + 4, sub);
        const __m128 d = _mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(block)));
        const float scale = d[0] * static_cast<float>(s & 0xffff);
        const float minimum = d[1] * static_cast<float>(s >> 16);
        const uint8_t* q = block + 16 + sub / 2 * kStrip;
        const __m128i shift = _mm_cvtsi32_si128(static_cast<int>(sub % 2 * 4)), mask = _mm_set1_epi8(15);
        const auto nibbles = [&](const uint8_t* from) {
            return _mm_and_si128(_mm_srl_epi16(bytes_at(from), shift), mask);
        };
        scaled_bytes(nibbles(q), nibbles(q + 16), scale, w);
        for (Vec& v : w) v -= minimum;
    }
};
