// Types, conversions and elementwise formulas. Plain C++, vectorised by the compiler with the flags of
// the including instruction set; no formula is contracted, so all instruction sets round alike.

struct Bf16 {
    uint16_t bits;
};

inline uint32_t float_bits(float v) { return __builtin_bit_cast(uint32_t, v); }
inline float bits_float(uint32_t v) { return __builtin_bit_cast(float, v); }

inline float to_float(float v) { return v; }
inline float to_float(Bf16 v) { return bits_float(static_cast<uint32_t>(v.bits) << 16); }

// Round to nearest even; a NaN stays one.
inline Bf16 to_bf16(float v) {
    const uint32_t u = float_bits(v);
    const uint32_t rounded = (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
    const uint32_t quiet = u >> 16 | 0x40u;
    return Bf16{static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? quiet : rounded)};
}

template <class To>
To from_float(float v);
template <>
inline float from_float<float>(float v) {
    return v;
}
template <>
inline Bf16 from_float<Bf16>(float v) {
    return to_bf16(v);
}

// The value after a stay in storage type S.
template <class S>
float through(float v) {
    return to_float(from_float<S>(v));
}

constexpr int64_t kLine = 64;

inline int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t pieces(int64_t n, int64_t size) { return (n + size - 1) / size; }

// Mask times 1 / (1 - p) for elements [first, first + n) of a row with hash `row`.
inline void apply_dropout(float* v, int64_t n, int64_t first, uint32_t row, uint32_t drop_below,
                          float keep_scale) {
    for (int64_t j = 0; j < n; ++j) {
        const uint32_t u = element_hash(row, static_cast<uint32_t>(first + j));
        v[j] = u >= drop_below ? v[j] * keep_scale : 0.0f;
    }
}

template <class From>
void widen(const From* from, int64_t n, float* to) {
    for (int64_t j = 0; j < n; ++j) to[j] = to_float(from[j]);
}
