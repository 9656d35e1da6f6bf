// Cache lines that the end of a row block's products will need: asked for one at a time during the
// products, where the micro-kernel can.
struct Touch {
    const char** lines;
    int64_t count = 0;

    void add(const void* line) { lines[count++] = static_cast<const char*>(line); }
};

// Decoding the next panel ahead, a unit after every few slices of products: its loads, shuffles and stores
// hide behind the multiplications still under way.
struct UnitAhead {
    static constexpr int64_t kFar = 4 * kUnits;  // units

    const Source* source = nullptr;  // until the last unit
    const Source* after = nullptr;
    int64_t begin = 0, unit = 0, units = 0;
    int64_t every = 1, wait = 1;  // slices of products between units, until the next
    int64_t quota = 0;            // units at a time
    float* panel = nullptr;

    // Slices [first, last) of `from` are wanted in `to`, during `slices` slices of products; `then` is the
    // source that will follow.
    void start(const Source& from, int64_t first, int64_t last, float* to, int64_t slices,
               const Source& then) {
        source = &from;
        after = &then;
        begin = first;
        unit = 0;
        units = (last - first) * kUnits;
        panel = to;
        every = wait = max_of(1, slices / units);
        quota = slices == 0 ? 0 : pieces(units, slices);
    }
    // `slices` slices of products have been done, at most `wait`.
    void step(int64_t slices) {
        wait -= slices;
        if (wait > 0) return;
        wait = every;
        for (int64_t q = 0; q < quota; ++q) decode_next();
    }
    void finish() {
        while (source != nullptr) decode_next();
    }
    void decode_next() {
        if (source == nullptr) return;
        const int64_t s = unit / kUnits;
        for (int i = 0; i < source->parts; ++i) {
            const Part& part = source->part[i];
            if (begin + s >= part.slice_begin && begin + s < part.slice_end)
                unit_decoder<float>(part.m.format)(part, begin + s, unit % kUnits,
                                                   panel + s * kSlice * 2 * kLanes);
        }
        if (++unit == units) source = nullptr;
    }
    // Memory that a unit later than the next one will read.
    Fetch fetch() const {
        if (source == nullptr) return {};
        const int64_t u = unit + kFar, s = begin + u / kUnits;
        for (int i = 0; i < source->parts; ++i)
            if (s < source->part[i].slice_end) return lines(source->part[i], s, u % kUnits);
        return {};
    }
    static Fetch lines(const Part& part, int64_t s, int64_t unit) {
        const Matrix& m = part.m;
        const int64_t depth = (s - part.slice_begin) * kSlice;
        const int64_t n =
            part.along_columns ? depth + unit * kUnitDepth : part.at + (unit - part.half) * kLanes;
        const int64_t k = part.along_columns ? part.at : depth;
        return {reinterpret_cast<const char*>(m.data) + n * m.row_bytes +
                    k * strip_bytes(m.format) / (8 * kStrip),
                m.row_bytes, part.along_columns ? kUnitDepth : kLanes};
    }
};

struct ComputeF32 {
    using T = float;
    using Micro = MicroF32;
    using Ahead = UnitAhead;

    // What a thread does before and after a task's products.
    static void enter() {}
    static void leave() {}

    static void run(Ahead& ahead, int count, const float* left, int64_t slices, const float* panel,
                    float* tile, bool accumulate, Touch touch) {
        for (int64_t i = 0; i < touch.count; ++i) __builtin_prefetch(touch.lines[i], 0, 2);
        while (slices > 0) {
            const int64_t now = min_of(slices, ahead.wait);
            Fetch fetch = ahead.fetch();
            MicroF32::run_lines(count, left, now * kSlice, panel, tile, accumulate, fetch);
            ahead.step(now);
            accumulate = true;
            left += now * kSlice * count;
            panel += now * kSlice * 2 * kLanes;
            slices -= now;
        }
    }
};
