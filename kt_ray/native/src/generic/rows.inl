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

// A tree over the lanes.
inline float vsum(Vec v) {
    alignas(64) float lane[kLanes];
    vstore(lane, v);
    for (int64_t half = kLanes / 2; half > 0; half /= 2)
        for (int64_t j = 0; j < half; ++j) lane[j] += lane[j + half];
    return lane[0];
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

struct RowsF32 {
    static bool fast(const Matrix&) { return false; }
    static int64_t ordered_size(int64_t) { return 0; }
    static void order(const Matrix&, const float*, float*) {}

    template <Format F, int M>
    static void row(const Matrix& m, int64_t n, const float* x, int64_t ld, const uint8_t* far, float* to) {
        VectorStrip<F> decode(m, n);
        Vec sum[M][kStripVectors];
        for (auto& of_token : sum)
            for (Vec& s : of_token) s = vset1(0.0f);
        const auto add = [&](const Vec(&w)[kStripVectors], int64_t k) {
            for (int i = 0; i < M; ++i)
                for (int64_t v = 0; v < kStripVectors; ++v)
                    sum[i][v] = vfma(w[v], vload(x + i * ld + k + v * kLanes), sum[i][v]);
        };
        Vec w[kStripVectors];
        int64_t k = 0;
        for (; k + kStrip <= m.cols; k += kStrip) {
            constexpr int64_t kBytes = block_bytes<F>() * kStrip / block_elements<F>();
            if (far != nullptr)
                for (int64_t byte = 0; byte < kBytes; byte += 64)
                    __builtin_prefetch(far + k / kStrip * kBytes + byte, 0, 2);
            decode(k, w);
            add(w, k);
        }
        if (k < m.cols) {
            float rest[kStrip] = {};
            strip<F>(m, n, k, m.cols - k, rest);
            for (int64_t v = 0; v < kStripVectors; ++v) w[v] = vload(rest + v * kLanes);
            add(w, k);
        }
        for (int i = 0; i < M; ++i) {
            for (int64_t half = kStripVectors / 2; half > 0; half /= 2)
                for (int64_t v = 0; v < half; ++v) sum[i][v] += sum[i][v + half];
            to[i * 2 * kLanes] = vsum(sum[i][0]);
        }
    }

    template <Format F>
    static void rows(const Matrix& m, const RowRange& range, const float* x, int64_t ld, int64_t tokens,
                     float* to) {
        for_tiles<kLanes == 16 ? 4 : 2>(
            m, range, tokens, [&](auto rows, auto some, int64_t n, int64_t t, const uint8_t* far) {
                for (int r = 0; r < rows.value; ++r)
                    row<F, some.value>(m, n + r, x + t * ld, ld,
                                       far == nullptr ? nullptr : far + r * m.row_bytes,
                                       to + t * 2 * kLanes + n + r - range.at);
            });
    }

    // to[t * 2 * kLanes + j] = row range.at + j times row t of x, rows of which are `ld` apart.
    static void dots(const Matrix& m, bool, const RowRange& range, const float* x, int64_t ld, int64_t tokens,
                     float* to) {
        switch (m.format) {
#define KT_FORMAT(F) \
    case Format::F:  \
        return rows<Format::F>(m, range, x, ld, tokens, to);
            KT_FORMATS(KT_FORMAT)
#undef KT_FORMAT
        }
    }
};
