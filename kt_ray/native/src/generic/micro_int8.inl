// The micro-kernel of INT8 products, written once over the instruction set's vector: IVec of kLanes int32
// with iload, istore, iset1, ifloat and idot(sum, panel, left), which adds to each lane the products of
// its elements, exactly.

// Sums of kMaxRowsF32 rows by two vectors; the loads of the float32 micro-kernel. Element is int8_t or,
// for instruction sets that multiply pairs of 16 bits, int16_t; the panel's elements have been raised by
// kRaised_, so that they are unsigned.
template <class Element, int kRaised_>
struct MicroInt8 {
    using T = Element;
    static constexpr int kRaised = kRaised_;
    static constexpr int64_t kPanelBytes = 128 * 1024, kSumPanels = 1;

    template <int N, class Job>
    static void tile(const char* left, int64_t piece_bytes, int64_t lines, const char* panel, int32_t* to,
                     bool accumulate, Job& job) {
        constexpr int64_t kVector = kLanes * 4;
        IVec sum[N][2];
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i) {
            sum[i][0] = accumulate ? iload(to + i * 2 * kLanes) : iset1(0);
            sum[i][1] = accumulate ? iload(to + i * 2 * kLanes + kLanes) : iset1(0);
        }
        for (int64_t line = 0; line < lines; ++line, left += piece_bytes) {
#pragma GCC unroll 2
            for (int64_t k = 0; k < 16; ++k) {
                const IVec b0 = iload(panel), b1 = iload(panel + kVector);
                panel += 2 * kVector;
#pragma GCC unroll 16
                for (int i = 0; i < N; ++i) {
                    int32_t few;
                    memcpy(&few, left + i * 64 + k * 4, sizeof(few));
                    const IVec x = iset1(few);
                    sum[i][0] = idot(sum[i][0], b0, x);
                    sum[i][1] = idot(sum[i][1], b1, x);
                }
            }
            job.step();
        }
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i) {
            istore(to + i * 2 * kLanes, sum[i][0]);
            istore(to + i * 2 * kLanes + kLanes, sum[i][1]);
        }
    }

    template <class Job, int... Counts>
    static void dispatch(int count, const char* left, int64_t lines, const char* panel, int32_t* to,
                         bool accumulate, Job& job, std::integer_sequence<int, Counts...>) {
        using Tile = void (*)(const char*, int64_t, int64_t, const char*, int32_t*, bool, Job&);
        static constexpr Tile tiles[] = {tile<Counts + 1, Job>...};
        const int runs = static_cast<int>(pieces(count, kMaxRowsF32));
        for (int q = 0; q < runs; ++q) {
            const int first = count * q / runs, rows = count * (q + 1) / runs - first;
            tiles[rows - 1](left + first * 64, count * 64, lines, panel, to + first * 2 * kLanes, accumulate,
                            job);
        }
    }

    // tile [count][2 * kLanes] (+)= packed left [lines][count][64 bytes] times panel [16 * lines] steps.
    template <class Job>
    static void run(int count, const T* left, int64_t lines, const T* panel, int32_t* to, bool accumulate,
                    Job& job) {
        dispatch(count, reinterpret_cast<const char*>(left), lines, reinterpret_cast<const char*>(panel), to,
                 accumulate, job, std::make_integer_sequence<int, kMaxRowsF32>());
    }
};

// Nibbles times rows quantised in groups of kSlice: the int32 sums of a group, times the scales of its row
// and of its columns, are added to float32 sums, one group after the other, each operation rounded.
template <class T>
struct MicroNibbles {
    static constexpr int kRows = kMaxRowsF32 / 2;  // each has two sums of either kind

    template <int N, class Job>
    static void tile(const char* left, int64_t piece_bytes, const RowScale* rows, int64_t next_rows,
                     int64_t lines, const char* panel, const float* scales, float* to, bool accumulate,
                     Job& job) {
        constexpr int64_t kVector = kLanes * 4, kSteps = kSlice / pack_of<T>();
        Vec sum[N][2];
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i) {
            sum[i][0] = accumulate ? vload(to + i * 2 * kLanes) : vset1(0.0f);
            sum[i][1] = accumulate ? vload(to + i * 2 * kLanes + kLanes) : vset1(0.0f);
        }
        for (int64_t line = 0; line < lines; ++line, left += piece_bytes) {
            for (int64_t group = 0; group < line_slices<T>(); ++group) {
                IVec part[N][2];
#pragma GCC unroll 16
                for (int i = 0; i < N; ++i) part[i][0] = part[i][1] = iset1(rows[i].start);
#pragma GCC unroll 2
                for (int64_t k = 0; k < kSteps; ++k) {
                    const IVec b0 = iload(panel), b1 = iload(panel + kVector);
                    panel += 2 * kVector;
#pragma GCC unroll 16
                    for (int i = 0; i < N; ++i) {
                        int32_t few;
                        memcpy(&few, left + i * 64 + (group * kSteps + k) * 4, sizeof(few));
                        const IVec x = iset1(few);
                        part[i][0] = idot(part[i][0], b0, x);
                        part[i][1] = idot(part[i][1], b1, x);
                    }
                }
                const Vec s0 = vload(scales), s1 = vload(scales + kLanes);
                scales += 2 * kLanes;
#pragma GCC unroll 16
                for (int i = 0; i < N; ++i) {
                    const Vec scale = vset1(rows[i].scale);
                    sum[i][0] = sum[i][0] + ifloat(part[i][0]) * scale * s0;
                    sum[i][1] = sum[i][1] + ifloat(part[i][1]) * scale * s1;
                }
                rows += next_rows;
            }
            job.step();
        }
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i) {
            vstore(to + i * 2 * kLanes, sum[i][0]);
            vstore(to + i * 2 * kLanes + kLanes, sum[i][1]);
        }
    }

    template <class Job, int... Counts>
    static void dispatch(int count, const char* left, const RowScale* rows, int64_t lines, const char* panel,
                         const float* scales, float* to, bool accumulate, Job& job,
                         std::integer_sequence<int, Counts...>) {
        using Tile = void (*)(const char*, int64_t, const RowScale*, int64_t, int64_t, const char*,
                              const float*, float*, bool, Job&);
        static constexpr Tile tiles[] = {tile<Counts + 1, Job>...};
        const int runs = static_cast<int>(pieces(count, kRows));
        for (int q = 0; q < runs; ++q) {
            const int first = count * q / runs, n = count * (q + 1) / runs - first;
            tiles[n - 1](left + first * 64, count * 64, rows + first, count, lines, panel, scales,
                         to + first * 2 * kLanes, accumulate, job);
        }
    }

    // tile [count][2 * kLanes] (+)= packed left [lines][count][64 bytes], whose rows' scales are
    // [slices][count], times a panel of nibbles with scales [slices][2 * kLanes].
    template <class Job>
    static void run(int count, const T* left, const RowScale* rows, int64_t slices, const T* panel,
                    const float* scales, float* to, bool accumulate, Job& job) {
        dispatch(count, reinterpret_cast<const char*>(left), rows, slices / line_slices<T>(),
                 reinterpret_cast<const char*>(panel), scales, to, accumulate, job,
                 std::make_integer_sequence<int, kRows>());
    }
};
