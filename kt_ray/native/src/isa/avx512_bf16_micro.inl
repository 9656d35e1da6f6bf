// vdpbf16ps: 10 rows by two vectors of pairs. 14 rows would need one load less per 20 products, but leave
// no registers for the decoding between them.
struct MicroBf16 {
    using T = Bf16;
    using Rows = RowsBf16;
    static constexpr int64_t kPack = 2;
    static constexpr int64_t kMaxRows = 10;
    static constexpr int64_t kPanelBytes = 128 * 1024, kSumPanels = 1;
    static constexpr int64_t kRowStep = 1;
    static constexpr bool kSpreads = true;
    static constexpr int64_t kPanelsAhead = 1;  // decoded side by side along columns
    static constexpr int64_t kFarSlices = 4;    // that memory is asked for before its use, into the L2 cache
    static void enter() {}
    static void leave() {}

    template <int N, class Job>
    static void tile(const Bf16* left, int64_t slices, const Bf16* panel, float* to, bool accumulate,
                     Job& job) {
        __m512 sum[N][2];
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i) {
            sum[i][0] = accumulate ? _mm512_loadu_ps(to + i * 32) : _mm512_setzero_ps();
            sum[i][1] = accumulate ? _mm512_loadu_ps(to + i * 32 + 16) : _mm512_setzero_ps();
        }
        const char* a = reinterpret_cast<const char*>(left);
        const char* b = reinterpret_cast<const char*>(panel);
        for (int64_t s = 0; s < slices; ++s) {
            auto far = job.far();
            auto near = job.near();
            const auto multiply = [&](int k) __attribute__((always_inline)) {
                const __m512bh b0 = (__m512bh)_mm512_loadu_si512(b + k * 128);
                const __m512bh b1 = (__m512bh)_mm512_loadu_si512(b + k * 128 + 64);
#pragma GCC unroll 16
                for (int i = 0; i < N; ++i) {
                    int pair;
                    memcpy(&pair, a + i * 64 + k * 4, sizeof(pair));
                    const __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
                    sum[i][0] = _mm512_dpbf16_ps(sum[i][0], x, b0);
                    sum[i][1] = _mm512_dpbf16_ps(sum[i][1], x, b1);
                }
            };
#pragma GCC unroll 2
            for (int k = 0; k < 16; k += 2) {
                if constexpr (Job::kFetches) {
                    _mm_prefetch(far.from, _MM_HINT_T1);
                    far.from += far.step;
                }
                multiply(k);
                if constexpr (Job::kFetchesNear) {
                    _mm_prefetch(near.from, Job::kNearHint);
                    near.from += near.step;
                }
                multiply(k + 1);
            }
            a += N * 64;
            b += 16 * 128;
            job.step();
        }
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i) {
            _mm512_storeu_ps(to + i * 32, sum[i][0]);
            _mm512_storeu_ps(to + i * 32 + 16, sum[i][1]);
        }
    }

    template <class Job, int... Counts>
    static void dispatch(int count, const Bf16* left, int64_t slices, const Bf16* panel, float* to,
                         bool accumulate, Job& job, std::integer_sequence<int, Counts...>) {
        using Tile = void (*)(const Bf16*, int64_t, const Bf16*, float*, bool, Job&);
        static constexpr Tile tiles[] = {tile<Counts + 1, Job>...};
        tiles[count - 1](left, slices, panel, to, accumulate, job);
    }

    // tile [count][32] (+)= packed left [slices][count][32] times panel [16 * slices][32][2].
    template <class Job>
    static void run(int count, const Bf16* left, int64_t slices, const Bf16* panel, float* to,
                    bool accumulate, Job& job) {
        dispatch(count, left, slices, panel, to, accumulate, job,
                 std::make_integer_sequence<int, kMaxRows>());
    }
};
