// Dot products of stored rows with a few rows of x, lanes along the contraction. An output's sum is made
// the same way whatever other rows of either are computed beside it.

// Rows [at, at + count) of a matrix, and those that will be wanted after them. `cold`: nothing came before,
// so nobody has fetched the first ones.
struct RowRange {
    int64_t at, count;
    bool cold;
    const uint8_t* after;
    int64_t after_count;
};

// How far ahead rows are fetched to the L2 cache, in bytes.
constexpr int64_t kRowsAhead = 32 << 10;

template <int N>
struct Count {
    static constexpr int value = N;
};

// tile(Count<R>, Count<M>, n, t, far): rows n to n + R - 1 with rows t to t + M - 1 of x. `far`: rows to
// fetch meanwhile, as many as these; or null.
template <int kMaxTokens, class Tile>
void for_tiles(const Matrix& m, const RowRange& range, int64_t tokens, const Tile& tile) {
    constexpr int64_t kRows = 4;
    const int64_t whole = pieces(range.count, kRows) * kRows;
    const int64_t ahead = max_of(kRows, min_of(whole, kRowsAhead / max_of(m.row_bytes, 1) / kRows * kRows));
    if (range.cold)
        for (int64_t r = range.at; r < range.at + min_of(ahead, range.count); ++r)
            for (int64_t byte = 0; byte < m.row_bytes; byte += 64)
                __builtin_prefetch(m.data + r * m.row_bytes + byte, 0, 2);
    for (int64_t i = 0; i < range.count; i += kRows) {
        const int64_t far = i + ahead;
        const uint8_t* fetch = nullptr;
        if (far + kRows <= range.count)
            fetch = m.data + (range.at + far) * m.row_bytes;
        else if (far >= whole && far - whole + kRows <= range.after_count)
            fetch = range.after + (far - whole) * m.row_bytes;
        const auto with_tokens = [&](auto rows, int64_t n, const uint8_t* from) {
            for (int64_t t = 0; t < tokens; from = nullptr) {
                if (kMaxTokens >= 4 && tokens - t >= 4) {
                    tile(rows, Count<kMaxTokens>(), n, t, from);
                    t += 4;
                } else if (kMaxTokens >= 4 && tokens - t == 3) {
                    tile(rows, Count<kMaxTokens - 1>(), n, t, from);
                    t += 3;
                } else if (tokens - t >= 2) {
                    tile(rows, Count<2>(), n, t, from);
                    t += 2;
                } else {
                    tile(rows, Count<1>(), n, t, from);
                    t += 1;
                }
            }
        };
        if (i + kRows <= range.count)
            with_tokens(Count<kRows>(), range.at + i, fetch);
        else
            for (int64_t r = i; r < range.count; ++r) with_tokens(Count<1>(), range.at + r, nullptr);
    }
}

// Float32 products: each vector of a strip has an accumulator. Strips are decoded by generic/formats.inl; an
// instruction set may bring better ones, as specialisations.
constexpr int64_t kStripVectors = kStrip / kLanes;

template <Format F>
struct VectorStrip {
    const Matrix& m;
    int64_t n;

    VectorStrip(const Matrix& matrix, int64_t row) : m(matrix), n(row) {}
    void operator()(int64_t k, Vec (&w)[kStripVectors]) const {
        float all[kStrip];
        strip<F>(m, n, k, kStrip, all);
        for (int64_t i = 0; i < kStripVectors; ++i) w[i] = vload(all + i * kLanes);
    }
};

// A format that has a row of its own: it reads x in the order in which a register of its bytes comes apart,
// so no element is moved, and scales multiply sums. An instruction set may bring some (isa/avx_rows.inl).
//
// fits(m) tells which matrices it takes. A step is kElements of a row, kBytes of it; order() writes their x,
// kOrdered floats, scales_of() the kScales scales, raw() reads. The kParts parts of a step are sums of their
// own: they begin with first(), values() calls add(w, at) with vectors of values and where their x is for
// each of kUnits units, and part_scale() multiplies. last(), if there is one, ends a step. met_nan(): a row
// of these had a NaN, has_nan(n): this one has, that values() gave as a number.
template <Format F>
struct OrderedRow {
    static constexpr bool kExists = false;
};

constexpr int64_t kScaleSteps = 32;  // whose scales are decoded at once

struct RowsF32 {
    // use(Format) with the matrix's own as a constant.
    template <class Use>
    static void with_format(const Matrix& m, const Use& use) {
        switch (m.format) {
#define KT_FORMAT(F) \
    case Format::F:  \
        return use(std::integral_constant<Format, Format::F>());
            KT_FORMATS(KT_FORMAT)
#undef KT_FORMAT
        }
    }

    // Whether the format's own row takes this matrix; it reads x in its own order.
    static bool fast(const Matrix& m) {
        bool fits = false;
        with_format(m, [&](auto format) {
            if constexpr (OrderedRow<format.value>::kExists) fits = OrderedRow<format.value>::fits(m);
        });
        return fits;
    }
    // Q4_K's order is the longest: 336 for 256.
    static int64_t ordered_size(int64_t depth) { return depth / 16 * 21 / kStrip * kStrip + 2 * kStrip; }

    // Whole steps in order, the rest as it is.
    static void order(const Matrix& m, const float* from, float* to) {
        with_format(m, [&](auto format) {
            using Row = OrderedRow<format.value>;
            if constexpr (Row::kExists) {
                int64_t k = 0;
                for (; k + Row::kElements <= m.cols; k += Row::kElements, to += Row::kOrdered)
                    Row::order(from + k, to);
                memcpy(to, from + k, (pieces(m.cols, kStrip) * kStrip - k) * sizeof(float));
            }
        });
    }

    template <Format F, int M>
    static void row(const Matrix& m, int64_t n, const float* x, int64_t ld, const uint8_t* far, float* to) {
        VectorStrip<F> decode(m, n);
        Vec sum[M][kStripVectors];
        for (auto& of_token : sum)
            for (Vec& s : of_token) s = vset1(0.0f);
        Vec w[kStripVectors];
        int64_t k = 0;
        for (; k + kStrip <= m.cols; k += kStrip) {
            constexpr int64_t kBytes = FormatTraits<F>::kBytes * kStrip / FormatTraits<F>::kElements;
            if (far != nullptr)
                for (int64_t byte = 0; byte < kBytes; byte += 64)
                    __builtin_prefetch(far + k / kStrip * kBytes + byte, 0, 2);
            decode(k, w);
            add_strip<M>(w, x + k, ld, sum);
        }
        if (k < m.cols) {
            last_strip<F>(m, n, k, w);
            add_strip<M>(w, x + k, ld, sum);
        }
        for (int i = 0; i < M; ++i) {
            for (int64_t half = kStripVectors / 2; half > 0; half /= 2)
                for (int64_t v = 0; v < half; ++v) sum[i][v] += sum[i][v + half];
            to[i * 2 * kLanes] = vsum(sum[i][0]);
        }
    }
    template <int M>
    [[gnu::always_inline]] static void add_strip(const Vec (&w)[kStripVectors], const float* x, int64_t ld,
                                                 Vec (*sum)[kStripVectors]) {
        for (int i = 0; i < M; ++i)
            for (int64_t v = 0; v < kStripVectors; ++v)
                sum[i][v] = vfma(w[v], vload(x + i * ld + v * kLanes), sum[i][v]);
    }
    // What is left of a row, zeros behind it.
    template <Format F>
    static void last_strip(const Matrix& m, int64_t n, int64_t k, Vec (&w)[kStripVectors]) {
        float rest[kStrip] = {};
        strip<F>(m, n, k, min_of(kStrip, m.cols - k), rest);
        for (int64_t v = 0; v < kStripVectors; ++v) w[v] = vload(rest + v * kLanes);
    }

    // Rows n to n + R - 1 with M rows of ordered x.
    template <Format F, int R, int M>
    static void ordered_tile(const Matrix& m, int64_t n, const float* x, int64_t ld, const uint8_t* far,
                             float* to) {
        using Row = OrderedRow<F>;
        constexpr int G = M >= R ? 1 : R / M;
        Row decoder(m);
        alignas(64) float scales[R][kScaleSteps * Row::kScales];
        Vec sum[R][M];
        for (auto& of_row : sum)
            for (Vec& s : of_row) s = vset1(0.0f);
        int64_t k = 0;
        while (k + Row::kElements <= m.cols) {
            const int64_t steps = min_of(kScaleSteps, (m.cols - k) / Row::kElements);
            for (int r = 0; r < R; ++r) decoder.scales_of(n + r, k, steps, scales[r]);
            for (int64_t step = 0; step < steps; ++step, k += Row::kElements, x += Row::kOrdered) {
                if (far != nullptr) {
                    for (int r = 0; r < R; ++r)
                        for (int64_t byte = 0; byte < Row::kBytes; byte += 64)
                            __builtin_prefetch(far + r * m.row_bytes + byte, 0, 2);
                    far += Row::kBytes;
                }
                const float* of_rows[R];
                for (int r = 0; r < R; ++r) of_rows[r] = scales[r] + step * Row::kScales;
#pragma GCC unroll 4
                for (int r = 0; r < R; r += G) add_step<G, M>(decoder, n + r, k, of_rows + r, x, ld, sum + r);
            }
        }
        for (; k < m.cols; k += kStrip, x += kStrip)
            for (int r = 0; r < R; ++r) {
                Vec w[kStripVectors];
                last_strip<F>(m, n + r, k, w);
                for (int i = 0; i < M; ++i)
                    for (int64_t v = 0; v < kStripVectors; ++v)
                        sum[r][i] = vfma(w[v], vload(x + i * ld + v * kLanes), sum[r][i]);
            }
        for (int i = 0; i < M; ++i)
            for (int r = 0; r < R; ++r) to[i * 2 * kLanes + r] = vsum(sum[r][i]);
        if (decoder.met_nan())
            for (int r = 0; r < R; ++r)
                if (decoder.has_nan(n + r))
                    for (int i = 0; i < M; ++i) to[i * 2 * kLanes + r] = __builtin_nanf("");
    }

    // A step of rows n to n + G - 1, whose units take turns: a sum's latency would otherwise fill the core.
    template <int G, int M, class Row>
    [[gnu::always_inline]] static void add_step(Row& decoder, int64_t n, int64_t k,
                                                const float* const* scales, const float* x, int64_t ld,
                                                Vec (*sum)[M]) {
        decltype(decoder.raw(n, k)) raw[G];
        for (int g = 0; g < G; ++g) raw[g] = decoder.raw(n + g, k);
#pragma GCC unroll 8
        for (int part = 0; part < Row::kParts; ++part) {
            Vec of[G][M];
            for (int g = 0; g < G; ++g)
                for (int m = 0; m < M; ++m) of[g][m] = Row::first(scales[g], x + m * ld, part);
#pragma GCC unroll 16
            for (int unit = 0; unit < Row::kUnits; ++unit)
#pragma GCC unroll 4
                for (int g = 0; g < G; ++g)
                    decoder.values(raw[g], part, unit, [&](Vec w, int64_t at) {
                        for (int m = 0; m < M; ++m) of[g][m] = vfma(w, vload(x + m * ld + at), of[g][m]);
                    });
            for (int g = 0; g < G; ++g) {
                const Vec scale = Row::part_scale(scales[g], part);
                for (int m = 0; m < M; ++m) sum[g][m] = vfma(of[g][m], scale, sum[g][m]);
            }
        }
        if constexpr (requires { Row::last(scales[0], x, sum[0][0]); })
            for (int g = 0; g < G; ++g)
                for (int m = 0; m < M; ++m) sum[g][m] = Row::last(scales[g], x + m * ld, sum[g][m]);
    }

    // to[t * 2 * kLanes + j] = row range.at + j times row t of x, rows of which are `ld` apart; in the
    // format's order if `fast`.
    static void dots(const Matrix& m, bool fast, const RowRange& range, const float* x, int64_t ld,
                     int64_t tokens, float* to) {
        with_format(m, [&](auto format) {
            constexpr Format F = format.value;
            if constexpr (OrderedRow<F>::kExists)
                if (fast)
                    return for_tiles<4>(
                        m, range, tokens, [&](auto rows, auto some, int64_t n, int64_t t, auto far) {
                            ordered_tile<F, rows.value, some.value>(m, n, x + t * ld, ld, far,
                                                                    to + t * 2 * kLanes + n - range.at);
                        });
            for_tiles<kLanes == 16 ? 4 : 2>(
                m, range, tokens, [&](auto rows, auto some, int64_t n, int64_t t, const uint8_t* far) {
                    for (int r = 0; r < rows.value; ++r)
                        row<F, some.value>(m, n + r, x + t * ld, ld,
                                           far == nullptr ? nullptr : far + r * m.row_bytes,
                                           to + t * 2 * kLanes + n + r - range.at);
                });
        });
    }
};
