// Elementwise work on vectors of kLanes floats, written once with the compiler's vector types. Formulas
// and roundings are those of scalar.inl, so every instruction set gives the same bits.

using IntVec = int32_t __attribute__((vector_size(kLanes * 4)));
using HalfVec = uint16_t __attribute__((vector_size(kLanes * 2)));

inline IntVec vbits(Vec v) { return __builtin_bit_cast(IntVec, v); }
inline Vec vfloat(IntVec v) { return __builtin_bit_cast(Vec, v); }
inline Vec vselect(IntVec condition, Vec yes, Vec no) { return condition ? yes : no; }

#ifndef KT_VECTOR_BF16  // an instruction set may bring its own
// Rounded to nearest even; a NaN stays one.
inline IntVec rounded_bits(Vec v) {
    using Unsigned = uint32_t __attribute__((vector_size(kLanes * 4)));
    const Unsigned u = __builtin_bit_cast(Unsigned, v);
    const Unsigned rounded = (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
    const Unsigned quiet = u >> 16 | 0x40u;
    return __builtin_bit_cast(IntVec, (u & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}
inline Vec vround_bf16(Vec v) { return vfloat(rounded_bits(v) << 16); }
inline void vstore(Bf16* to, Vec v) {
    const HalfVec bits = __builtin_convertvector(rounded_bits(v), HalfVec);
    memcpy(to, &bits, sizeof(bits));
}
#endif

// The value after a stay in storage type S.
template <class S>
inline Vec vthrough(Vec v) {
    if constexpr (sizeof(S) == 2)
        return vround_bf16(v);
    else
        return v;
}

// The sum of the lanes, as a tree: each half plus the other, down to one.
template <int kCount>
struct Halves {
    typedef float Half __attribute__((vector_size(kCount * 2)));
    Half low, high;
};
template <class V>
inline float vsum(V v) {
    using Two = Halves<sizeof(V) / sizeof(float)>;
    const Two two = __builtin_bit_cast(Two, v);
    if constexpr (sizeof(V) == 2 * sizeof(float))
        return two.low[0] + two.high[0];
    else
        return vsum(two.low + two.high);
}

// exp with a relative error below 2e-7 on [-87.3, 88]; arguments beyond are clamped, NaN passes.
// Range reduction by log 2 in two parts, then the degree-5 minimax polynomial of Cephes' expf.
inline Vec vexp_clamped(Vec x) {
    constexpr float kExpRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    x = vselect(x < -87.3f, vset1(-87.3f), x);
    x = vselect(x > 88.0f, vset1(88.0f), x);
    const Vec t = x * 1.44269504088896341f + kExpRound;
    const Vec n = t - kExpRound;
    Vec r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    Vec p = vset1(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    const Vec y = p * (r * r) + r + 1.0f;
    return y * vfloat((vbits(t) << 23) + 0x3f800000);
}

inline Vec vsigmoid(Vec x) { return 1.0f / (1.0f + vexp_clamped(-x)); }

// GELU in its tanh form is g * sigmoid(2 z) with z = sqrt(2 / pi) (g + 0.044715 g^3).
inline Vec vgelu_gate(Vec g) { return vsigmoid(1.5957691216057308f * (g + 0.044715f * (g * g * g))); }
inline Vec vgelu_slope(Vec g) { return 1.5957691216057308f * (1.0f + 0.134145f * (g * g)); }
