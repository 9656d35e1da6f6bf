// The micro-kernel of INT8 products, written once over the instruction set's vector: IVec of kLanes int32
// with iload, istore, iset1 and idot(sum, panel, left), which adds to each lane the products of its
// elements, exactly.

// Sums of kMaxRowsF32 rows by two vectors; the loads of the float32 micro-kernel. Element is int8_t or,
// for instruction sets that multiply pairs of 16 bits, int16_t; kBias is what the panel's elements have
// been raised by, so that they are unsigned.
template <class Element, int kBias>
struct MicroInt8 {
    using T = Element;
    static constexpr int32_t kOffset = kBias;
    static constexpr int64_t kPanelBytes = 128 * 1024, kSumPanels = 1;
    static constexpr bool kInPassing = false;

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
