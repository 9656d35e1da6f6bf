// Members of Moe: gate and up kept as blocks of int8 (Keep::int8). Included inside the class.
//
// A kept row: parts * inter_pad int8, then a bfloat16 scale for each kKeptBlock of them.

int8_t* kept_row(int64_t row) const { return static_cast<int8_t*>(p.pair_int8) + row * kept_row_bytes(p); }

// Gate and up of a chunk's rows become what their blocks hold, and act is taken from that.
void shrink(int64_t task) const {
    each_row(p.chunks[task], [&](const RowBlock& b, int64_t k) {
        int8_t* kept = kept_row(b.begin + k);
        Bf16* scale = reinterpret_cast<Bf16*>(kept + p.parts * p.inter_pad);
        for (int64_t i = 0; i < p.parts * p.inter_pad; i += kKeptBlock) {
            alignas(64) float values[kKeptBlock];
            for (int64_t j = 0; j < kKeptBlock; j += kLanes)
                vstore(values + j, vload(packed_at(pair(b), b, k, i + j)));
            *scale++ = shrink_block(values, kept + i);
        }
        restore_row(b, k);
        for_activation([&](auto kind) { activate_row<decltype(kind)::value>(b, k); });
    });
}

// Returns the scale. A block that is not finite becomes NaN.
static Bf16 shrink_block(const float* values, int8_t* to) {
    float largest = 0.0f;
    for (int64_t j = 0; j < kKeptBlock; ++j) {
        const float size = values[j] < 0.0f ? -values[j] : values[j];
        largest = size > largest || size != size ? size : largest;
    }
    const float step = through<Bf16>(largest / 127.0f);
    const bool usable = step > 0.0f && step < __builtin_inff();
    const float inverse = usable ? 1.0f / step : 0.0f;
    constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    for (int64_t j = 0; j < kKeptBlock; ++j) {
        float level = values[j] * inverse;
        level = level > 127.0f ? 127.0f : level < -127.0f ? -127.0f : level;
        to[j] = usable ? static_cast<int8_t>((level + kRound) - kRound) : 0;
    }
    return to_bf16(largest <= __FLT_MAX__ ? step : __builtin_nanf(""));
}

void restore(int64_t task) const {
    each_row(p.chunks[task], [&](const RowBlock& b, int64_t k) { restore_row(b, k); });
}

void restore_row(const RowBlock& b, int64_t k) const {
    const int8_t* kept = kept_row(b.begin + k);
    const Bf16* scale = reinterpret_cast<const Bf16*>(kept + p.parts * p.inter_pad);
    for (int64_t i = 0; i < p.parts * p.inter_pad; i += kKeptBlock, ++scale) {
        alignas(64) float values[kKeptBlock];
        for (int64_t j = 0; j < kKeptBlock; ++j) values[j] = static_cast<float>(kept[i + j]);
        for (int64_t j = 0; j < kKeptBlock; j += kLanes)
            vstore(packed_at(pair(b), b, k, i + j), vset1(to_float(*scale)) * vload(values + j));
    }
}

// act from stored gate and up; their padding is zero, and so is its.
template <Activation A>
void activate_row(const RowBlock& b, int64_t k) const {
    const ActivationSpec spec = p.activation;
    for (int64_t i = 0; i < p.inter_pad; i += kLanes) {
        const Vec g = vload(packed_at(pair(b), b, k, i));
        const Vec u = A == Activation::relu2 ? g : vload(packed_at(pair(b), b, k, p.inter_pad + i));
        store_rounded(packed_at(act(b), b, k, i), activate<A>(spec, g, u));
    }
}
