// The float32 micro-kernel, written once over the instruction set's vector: Vec of kLanes floats with
// vload, vstore, vset1, vfma(a, b, c) = a * b + c.

// Lines of memory that products ask for in passing, one in four depths, into the L2 cache.
struct Fetch {
    static constexpr int64_t kRows = 4;
    struct Lines {
        const char* from;
        int64_t step;
    };
    const char* from = nullptr;
    int64_t step_bytes = 0, count = 0;

    Lines far() const { return {from, count > 0 ? step_bytes : 0}; }
    void step() {
        from += count > 0 ? kRows * step_bytes : 0;
        count -= kRows;
    }
};

struct MicroF32 {
    using T = float;
    static constexpr int64_t kPack = 1;
    static constexpr int64_t kLine = 16;
    static constexpr int64_t kMaxRows = kMaxRowsF32;
    static constexpr int64_t kPanelBytes = 128 * 1024, kSumPanels = 1;
    // Along columns a line of the matrix holds columns of two panels of 16: short panels in groups meet it
    // again while a cache has it.
    static constexpr int64_t kColumnPanelBytes = kLanes == 8 ? 32 * 1024 : kPanelBytes;
    static constexpr int64_t kColumnSumPanels = kLanes == 8 ? 8 : kSumPanels;
    static constexpr int64_t kRowStep = 1;

    // `left1` multiplies the second half of the panel; the same as `left0` unless kTwo.
    template <int N, bool kTwo>
    static void tile(const float* left0, const float* left1, int64_t piece_stride, int64_t steps,
                     const float* panel, float* to, bool accumulate) {
        Vec sum[N][2];
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i) {
            sum[i][0] = accumulate ? vload(to + i * 2 * kLanes) : vset1(0.0f);
            sum[i][1] = accumulate ? vload(to + i * 2 * kLanes + kLanes) : vset1(0.0f);
        }
        for (int64_t done = 0; done < steps; done += kLine) {
            const int64_t n = min_of(kLine, steps - done);
            for (int64_t k = 0; k < n; ++k) {
                const Vec b0 = vload(panel), b1 = vload(panel + kLanes);
                panel += 2 * kLanes;
#pragma GCC unroll 16
                for (int i = 0; i < N; ++i) {
                    const Vec x0 = vset1(left0[i * kLine + k]);
                    const Vec x1 = kTwo ? vset1(left1[i * kLine + k]) : x0;
                    sum[i][0] = vfma(x0, b0, sum[i][0]);
                    sum[i][1] = vfma(x1, b1, sum[i][1]);
                }
            }
            left0 += piece_stride;
            left1 += piece_stride;
        }
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i) {
            vstore(to + i * 2 * kLanes, sum[i][0]);
            vstore(to + i * 2 * kLanes + kLanes, sum[i][1]);
        }
    }

    template <bool kTwo, int... Counts>
    static void dispatch(int count, const float* left0, const float* left1, int64_t steps, const float* panel,
                         float* to, bool accumulate, std::integer_sequence<int, Counts...>) {
        using Tile = void (*)(const float*, const float*, int64_t, int64_t, const float*, float*, bool);
        static constexpr Tile tiles[] = {tile<Counts + 1, kTwo>...};
        const int runs = static_cast<int>(pieces(count, kMaxRows));
        for (int q = 0; q < runs; ++q) {
            const int first = count * q / runs, rows = count * (q + 1) / runs - first;
            tiles[rows - 1](left0 + first * kLine, left1 + first * kLine, count * kLine, steps, panel,
                            to + first * 2 * kLanes, accumulate);
        }
    }

    // The same for whole lines of at most kMaxRows rows; job.far() names lines of memory that the products of
    // a line ask for one by one, job.step() runs after it.
    template <int N, class Job>
    static void tile_lines(const float* left, int64_t steps, const float* panel, float* to, bool accumulate,
                           Job& whose) {
        Job job = whose;  // in registers
        Vec sum[N][2];
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i) {
            sum[i][0] = accumulate ? vload(to + i * 2 * kLanes) : vset1(0.0f);
            sum[i][1] = accumulate ? vload(to + i * 2 * kLanes + kLanes) : vset1(0.0f);
        }
        const auto multiply = [&](int k) __attribute__((always_inline)) {
            const Vec b0 = vload(panel + k * 2 * kLanes), b1 = vload(panel + k * 2 * kLanes + kLanes);
#pragma GCC unroll 16
            for (int i = 0; i < N; ++i) {
                const Vec x = vset1(left[i * kLine + k]);
                sum[i][0] = vadd_product(sum[i][0], x, b0);
                sum[i][1] = vadd_product(sum[i][1], x, b1);
            }
        };
        for (int64_t done = 0; done < steps; done += kLine) {
            const float* const end = left + kLine;
            auto far = job.far();
            for (int64_t q = 0; left < end; left += 4, ++q) {
                if (Job::kRows == 4 || q < Job::kRows) {
                    __builtin_prefetch(far.from, 0, 2);
                    far.from += far.step;
                }
#pragma GCC unroll 4
                for (int k = 0; k < 4; ++k) multiply(k);
                panel += 4 * 2 * kLanes;
            }
            left += (N - 1) * kLine;
            job.step();
        }
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i) {
            vstore(to + i * 2 * kLanes, sum[i][0]);
            vstore(to + i * 2 * kLanes + kLanes, sum[i][1]);
        }
        whose = job;
    }
    template <class Job, int... Counts>
    static void dispatch_lines(int count, const float* left, int64_t steps, const float* panel, float* to,
                               bool accumulate, Job& job, std::integer_sequence<int, Counts...>) {
        using Tile = void (*)(const float*, int64_t, const float*, float*, bool, Job&);
        static constexpr Tile tiles[] = {tile_lines<Counts + 1, Job>...};
        tiles[count - 1](left, steps, panel, to, accumulate, job);
    }
    template <class Job>
    static void run_lines(int count, const float* left, int64_t steps, const float* panel, float* to,
                          bool accumulate, Job& job) {
        dispatch_lines(count, left, steps, panel, to, accumulate, job,
                       std::make_integer_sequence<int, kMaxRows>());
    }

    // tile [count][2 * kLanes] (+)= packed left [.., steps] times panel [steps][2 * kLanes].
    static void run(int count, const float* left, int64_t steps, const float* panel, float* to,
                    bool accumulate) {
        dispatch<false>(count, left, left, steps, panel, to, accumulate,
                        std::make_integer_sequence<int, kMaxRows>());
    }

    // The halves of the tile += left0 and left1 times the halves of the panel.
    static void run_two(int count, const float* left0, const float* left1, int64_t steps, const float* panel,
                        float* to) {
        dispatch<true>(count, left0, left1, steps, panel, to, true,
                       std::make_integer_sequence<int, kMaxRows>());
    }
};
