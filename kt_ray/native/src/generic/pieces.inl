// Decoding the next float panel inside the products of the current one: a piece of 4 to 16 vectors after
// every 16 depths. Needs the vectors of generic/units.inl.

// Consecutive slices of a panel that are complete: along rows of one half of its columns, along columns of
// both.
struct PieceRun {
    const uint8_t* from;  // first slice
    int64_t row_bytes, slice_bytes;
    const uint8_t* after;  // what will be read when these end
    int64_t after_row_bytes;
    float* to;
    int64_t column;       // along columns, the first
    const float* scales;  // along rows [slice][kLanes], of NVFP4 [piece][kLanes]; else [slice][kSlice]
    const float* zeros;   // likewise, of units with zero points
    int64_t pieces, slices;
};

// Slices between what is asked for and what is decoded. Along columns a slice is 32 rows, and rows a power of
// two apart share sets of the L2 cache: 8 KiB apart (Mixtral) it holds 128 of them, with what is being
// decoded.
constexpr int64_t kFarAlongRows = 4, kFarAlongColumns = 2;
// Pieces are decoded inside the micro-kernel, where few registers are enough for one or there are many; else
// after so many lines.
template <Format F, bool kAlongColumns>
constexpr bool kInside = kLanes == 16 || kAlongColumns || Units<F>::kBytes >= 64;
constexpr int64_t kLinesBetween = 8;

struct PieceState {
    PieceRun runs[2];
    int run = 0, count = 0;
    int64_t piece = 0;  // next, of the current run
    // Pieces are spread over the lines of products: one whenever `due`, which grows by all pieces with every
    // line, reaches all lines. Anew with each run, as a tile does not go beyond the end of one.
    int64_t pieces = 0, lines = 0, due = 0;
    int64_t left = 0;  // lines of products still to come
    bool bad = false;  // seen: what the vectors do not decode, an E4M3 NaN or too large a scale

    void spread() {
        pieces = 0;
        for (int i = run; i < count; ++i) pieces += runs[i].pieces;
        lines = max_of(1, left);
        due = 0;
    }
};

// Lines of memory that products ask for one by one.
struct FarLines {
    const char* from;
    int64_t step;
};
// Rows from `row` on of what lies far ahead of slice s: along columns, rows of that slice.
[[gnu::always_inline]] inline FarLines far_lines(const PieceRun& run, bool along_columns, int64_t s,
                                                 int64_t row) {
    s += along_columns ? kFarAlongColumns : kFarAlongRows;
    const bool over = s >= run.slices;
    if (over) s -= run.slices;
    const uint8_t* from = over ? run.after : run.from;
    const int64_t row_bytes = over ? run.after_row_bytes : run.row_bytes;
    const int64_t slice = along_columns ? kSlice * row_bytes : run.slice_bytes;
    return {reinterpret_cast<const char*>(from) + s * slice + row * row_bytes, row_bytes};
}

template <Format F, bool kAlongColumns>
struct PieceJob {
    using U = Units<F>;
    // Along rows a piece is 16 bytes of kLanes rows, or half of their dwords where all would be too much for
    // the registers; along columns it is kLanes / 4 rows, of GGUF blocks 4.
    static constexpr bool kWide = U::kBytes >= 64;
    static constexpr bool kZeros = requires { U::kZeros; };
    static constexpr bool kOfBlocks = U::kBlocks && kAlongColumns;
    // Along rows a block's scales come before its codes: one of each piece of a slice.
    static constexpr bool kOwnScales = U::kBlocks && !kAlongColumns;
    static constexpr int64_t kSplit = kWide && kLanes == 16 ? 1 : 2;
    // Whose lines a step asks for.
    static constexpr int64_t kRows = kOfBlocks                 ? 4
                                     : kWide && !kAlongColumns ? kLanes / (4 * kSplit)
                                                               : kLanes / 4;
    static constexpr int64_t kOfSlice = kAlongColumns ? kSlice / kRows : U::kBytes / 16 * kSplit;

    PieceRun run;
    int64_t piece, pieces, lines, due;
    bool bad;

    explicit PieceJob(const PieceState& s)
        : run(s.runs[s.run]), piece(s.piece), pieces(s.pieces), lines(s.lines), due(s.due), bad(s.bad) {}
    void end(PieceState& s) const {
        s.piece = piece;
        s.due = due;
        s.bad = bad;
    }

    [[gnu::always_inline]] FarLines far() const {
        const int64_t row = piece % (kAlongColumns ? kOfSlice : kLanes / kRows) * kRows;
        FarLines lines = far_lines(run, kAlongColumns, piece / kOfSlice, row);
        // Of a GGUF block the line of its last codes: the codes before came with the columns before.
        if constexpr (kOfBlocks) lines.from += U::place(run.column).low + 2 * kLanes - 1;
        if constexpr (!kAlongColumns && U::kBytes > 64) lines.from += piece % kOfSlice / (4 * kSplit) * 64;
        return lines;
    }
    [[gnu::always_inline]] void step() {
        bool more = false;
        for (due += pieces; due >= lines && piece < run.pieces; due -= lines) {
            if (more) fetch();
            decode();
            more = true;
        }
    }
    void fetch() const {
        FarLines l = far();
        for (int64_t i = 0; i < kRows; ++i, l.from += l.step) __builtin_prefetch(l.from, 0, 2);
    }

    [[gnu::always_inline]] void decode() {
        const int64_t s = piece / kOfSlice, q = piece % kOfSlice;
        if constexpr (kOfBlocks) {
            const auto place = U::place(run.column);
            const uint8_t* from = run.from + (s * kSlice + kRows * q) * run.row_bytes;
            float* to = run.to + (s * kSlice + kRows * q) * 2 * kLanes;
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r, from += run.row_bytes, to += 2 * kLanes) {
                const auto put = [&](int v, Vec value)
                                     __attribute__((always_inline)) { vstore(to + v * kLanes, value); };
                if constexpr (requires { U::two(from, place, 1.0f, put); })
                    U::two(from, place, run.scales[s * kSlice + kRows * q + r], put);
                else
                    U::two(from, place, put);
            }
        } else if constexpr (kAlongColumns) {
            constexpr int64_t kBytes = kLanes * U::kBytes / kSlice;
            const uint8_t* from = run.from + (s * kSlice + kRows * q) * run.row_bytes;
            float* to = run.to + (s * kSlice + kRows * q) * 2 * kLanes;
            const float* scales = run.scales + s * kSlice + kRows * q;
            const float* zeros = run.zeros + s * kSlice + kRows * q;
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r, from += run.row_bytes, to += 2 * kLanes) {
                const float scale = U::kScaled ? scales[r] : 1.0f;
                Vec low = U::row(from, scale), high = U::row(from + kBytes, scale);
                if constexpr (kZeros) {
                    low = (low - vset1(zeros[r])) * scale;
                    high = (high - vset1(zeros[r])) * scale;
                }
                vstore(to, low);
                vstore(to + kLanes, high);
                if constexpr (F == Format::fp8)
                    if (any_bit(
                            (((load_bytes(from) & 0x7fu) + 1u) | ((load_bytes(from + kBytes) & 0x7fu) + 1u)) &
                            0x80u)) [[unlikely]]
                        bad = true;
            }
        } else {
            const uint8_t* from =
                run.from + s * run.slice_bytes + q / kSplit * 16 + (kOwnScales ? kOfSlice : 0);
            float* to = run.to + s * kSlice * 2 * kLanes;
            const int64_t scale = kOwnScales ? piece : s;
            const Vec scales = U::kScaled || kOwnScales ? vload(run.scales + scale * kLanes) : vset1(1.0f);
            const Vec zeros = kZeros ? vload(run.zeros + s * kLanes) : vset1(0.0f);
            const auto put = [&](int depth, Vec value) __attribute__((always_inline)) {
                if constexpr (kZeros) value = (value - zeros) * scales;
                vstore(to + depth * 2 * kLanes, value);
            };
            const Bits r0 = load_lanes(from, run.row_bytes),
                       r1 = load_lanes(from + run.row_bytes, run.row_bytes);
            const Bits r2 = load_lanes(from + 2 * run.row_bytes, run.row_bytes);
            const Bits r3 = load_lanes(from + 3 * run.row_bytes, run.row_bytes);
            to += q / kSplit * (kSlice * 16 / U::kBytes) * 2 * kLanes;
            const auto two = [&](Bits a, Bits b, int d) __attribute__((always_inline)) {
                const Bits v0 = unpack_low_64(a, b), v1 = unpack_high_64(a, b);
                U::each(d, v0, scales, put);
                U::each(d + 1, v1, scales, put);
                if constexpr (F == Format::fp8)
                    if (any_bit((((v0 & 0x7f7f7f7fu) + 0x01010101u) | ((v1 & 0x7f7f7f7fu) + 0x01010101u)) &
                                0x80808080u)) [[unlikely]]
                        bad = true;
            };
            if constexpr (kSplit == 1) {
                two(unpack_low_32(r0, r1), unpack_low_32(r2, r3), 0);
                two(unpack_high_32(r0, r1), unpack_high_32(r2, r3), 2);
            } else if (q % 2 == 0) {
                two(unpack_low_32(r0, r1), unpack_low_32(r2, r3), 0);
            } else {
                two(unpack_high_32(r0, r1), unpack_high_32(r2, r3), 2);
            }
        }
        ++piece;
    }
};

// Asks for the lines of the next `pieces` pieces, as PieceJob does, and leaves them to be decoded afterwards.
struct PieceFetch {
    static constexpr int64_t kRows = 4;
    PieceRun run;
    int64_t piece, pieces, of_slice, rows;
    bool along_columns;

    [[gnu::always_inline]] FarLines far() const {
        if (pieces <= 0) return {reinterpret_cast<const char*>(run.from), 0};
        const int64_t row = (along_columns ? piece & (of_slice - 1) : piece & 3) * rows;
        return far_lines(run, along_columns, static_cast<uint32_t>(piece) / static_cast<uint32_t>(of_slice),
                         row);
    }
    [[gnu::always_inline]] void step() {
        const int64_t done = 4 / rows;
        piece += done;
        pieces -= done;
    }
};

// Formats without pieces: a unit after every few slices of products, which have asked for its memory.
struct UnitAhead {
    static constexpr int64_t kFar = 4 * kUnits;  // units

    const Source* source = nullptr;  // until the last unit
    int64_t begin = 0, unit = 0, units = 0;
    int64_t every = 1, wait = 1;  // slices of products between units, until the next
    int64_t quota = 0;            // units at a time
    float* panel = nullptr;

    // A stretch is wanted in `to`, during `slices` slices of products.
    void start(const Stretch& wanted, float* to, int64_t slices) {
        source = wanted.source;
        begin = wanted.begin;
        unit = 0;
        units = (wanted.end - begin) * kUnits;
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

    void run(int count, const float* left, int64_t slices, const float* panel, float* tile, bool accumulate) {
        while (slices > 0) {
            const int64_t now = min_of(slices, wait);
            Fetch asked = fetch();
            MicroF32::run_lines(count, left, now * kSlice, panel, tile, accumulate, asked);
            step(now);
            accumulate = true;
            left += now * kSlice * count;
            panel += now * kSlice * 2 * kLanes;
            slices -= now;
        }
    }
};

struct ComputeF32Ahead {
    using T = float;
    using Micro = MicroF32;
    using Rows = RowsF32;
    using Products = void (*)(PieceState&, int, const float*, int64_t, const float*, float*, bool);
    using Drain = void (*)(PieceState&, int64_t);

    template <Format F, bool kAlongColumns>
    static void products(PieceState& state, int count, const float* left, int64_t slices, const float* panel,
                         float* tile, bool accumulate) {
        PieceJob<F, kAlongColumns> job(state);
        if constexpr (kInside<F, kAlongColumns>) {
            MicroF32::run_lines(count, left, slices * kSlice, panel, tile, accumulate, job);
        } else {
            using J = PieceJob<F, kAlongColumns>;
            constexpr int64_t kSteps = kLinesBetween * MicroF32::kLine;
            for (int64_t done = 0, steps = slices * kSlice; done < steps; done += kSteps) {
                const int64_t now = min_of(kSteps, steps - done);
                job.due += job.pieces * (now / MicroF32::kLine);
                const int64_t pieces = min_of(job.due / job.lines, job.run.pieces - job.piece);
                job.due -= pieces * job.lines;
                PieceFetch fetch{job.run, job.piece, pieces, J::kOfSlice, J::kRows, kAlongColumns};
                MicroF32::run_lines(count, left + done * count, now, panel + done * 2 * kLanes, tile,
                                    accumulate || done > 0, fetch);
                for (int64_t q = 0; q < pieces; ++q) job.decode();
            }
        }
        job.end(state);
    }
    template <Format F, bool kAlongColumns>
    static void drain(PieceState& state, int64_t pieces) {
        PieceJob<F, kAlongColumns> job(state);
        for (; pieces > 0 && job.piece < job.run.pieces; --pieces) {
            job.fetch();
            job.decode();
        }
        job.end(state);
    }
    // Of the halves of NVFP4's strips, along rows, as PieceRun has them.
    static void block_scales(const Matrix& m, int64_t n, int64_t k, int64_t slices, float* to) {
        for (int64_t lane = 0; lane < kLanes; ++lane) {
            const float all = strip_scale(m, n + lane, 0);
            const uint8_t* block = block_at<Format::nvfp4>(m, n + lane, k);
            for (int64_t s = 0; s < slices; ++s, block += FormatTraits<Format::nvfp4>::kBytes)
                for (int64_t half = 0; half < 2; ++half)
                    to[(2 * s + half) * kLanes + lane] = kFp8.of[block[half]] * all;
        }
    }

    // Scales times `factor`, as PieceRun has them; false: that is too much for one.
    static bool scales_of(const Matrix& m, bool along_columns, int64_t n, int64_t k, int64_t slices,
                          float factor, float* to) {
        if (m.scale_type == ScaleType::none) return true;
        if (m.format == Format::nvfp4 && !along_columns) {
            block_scales(m, n, k, slices, to);
            return true;
        }
        const int64_t count = slices * (along_columns ? kSlice : kLanes);
        if (along_columns)
            column_scales(m, n, k, count, to);
        else
            for (int64_t s = 0; s < slices; ++s) column_scales(m, n, k + s * kSlice, kLanes, to + s * kLanes);
        if (factor == 1.0f) return true;
        bool fits = true;
        for (int64_t i = 0; i < count; ++i) {
            fits &= !(__builtin_fabsf(to[i]) > 0x1p119f);
            to[i] *= factor;
        }
        return fits;
    }

    struct Functions {
        Products products = nullptr;
        Drain drain = nullptr;
        int64_t of_slice = 0, bytes = 0;
        float factor = 1.0f;
        const uint8_t* (*first)(const Matrix&, int64_t n,
                                int64_t k) = nullptr;  // bytes of (n, k), or its block
    };
    template <Format F>
    static const uint8_t* first_bytes(const Matrix& m, int64_t n, int64_t k) {
        if constexpr (Units<F>::kBlocks) return block_at<F>(m, n, k);
        return m.data + n * m.row_bytes + k * Units<F>::kBytes / kSlice;
    }
    template <Format F, bool kAlongColumns>
    static constexpr Functions functions_of() {
        if constexpr (Units<F>::kThere &&
                      (kAlongColumns || !Units<F>::kBlocks || requires { Units<F>::kAlongRows; }))
            return {products<F, kAlongColumns>, drain<F, kAlongColumns>, PieceJob<F, kAlongColumns>::kOfSlice,
                    Units<F>::kBytes,           Units<F>::kScale,        first_bytes<F>};
        return {};
    }
    static Functions functions(Format format, bool along_columns) {
        switch (format) {
#define KT_FORMAT(F) \
    case Format::F:  \
        return along_columns ? functions_of<Format::F, true>() : functions_of<Format::F, false>();
            KT_FORMATS(KT_FORMAT)
#undef KT_FORMAT
        }
        return {};
    }

    struct Ahead {
        PieceState state;
        Functions use;
        UnitAhead units;  // of formats without pieces
        Stretch wanted{};
        float* panel = nullptr;
        alignas(64) float scales[2][MicroF32::kPanelBytes / (kSlice * 2 * kLanes * 4) * kSlice];
        alignas(64) float zeros[2][sizeof(scales[0]) / sizeof(float)];

        // As UnitAhead::start. What does not come in whole slices is decoded here.
        void start(const Stretch& now, float* to, int64_t slices, const Stretch& then) {
            state.run = state.count = 0;
            state.piece = 0;
            state.bad = false;
            wanted = now;
            panel = to;
            units.source = nullptr;
            const Source& from = *now.source;
            const int64_t first = now.begin, last = now.end;
            const Part& a = from.part[0];
            use = functions(a.m.format, a.along_columns);
            if (use.products == nullptr || !whole(from)) return units.start(now, to, slices);
            const bool along_columns = a.along_columns;
            for (int i = 0; i < 2; ++i) {
                if (along_columns && i >= from.parts) break;
                const Part& part = from.part[from.parts == 2 ? i : 0];
                const Matrix& m = part.m;
                const int64_t s0 = max_of(first, part.slice_begin);
                const int64_t depth = along_columns ? m.rows : m.cols;
                const int64_t s1 = min_of(last, part.slice_begin + depth / kSlice);
                const int64_t s2 = min_of(last, part.slice_end);
                if (s1 < s2 && s0 < s2 &&
                    (along_columns || i == 0 || from.parts == 2))  // the end of the depth
                    decode_part<float>(part, max_of(s0, s1), s2,
                                       to + (max_of(s0, s1) - first) * kSlice * 2 * kLanes);
                if (s1 <= s0) continue;
                PieceRun& run = state.runs[state.count];
                const int64_t k = (s0 - part.slice_begin) * kSlice;
                const int64_t at = part.at + (along_columns || from.parts == 2 ? 0 : i * kLanes);
                run.row_bytes = m.row_bytes;
                run.slice_bytes = use.bytes;
                run.column = at;
                run.from = along_columns ? use.first(m, k, at) : use.first(m, at, k);
                run.slices = s1 - s0;
                run.pieces = run.slices * use.of_slice;
                run.to = to + (s0 - first) * kSlice * 2 * kLanes + (along_columns ? 0 : i * kLanes);
                run.scales = scales[state.count];
                run.zeros = zeros[state.count];
                if (m.format == Format::uint4)
                    scales_of(zeros_as_scales(m), along_columns, along_columns ? k : at,
                              along_columns ? at : k, run.slices, 1.0f, zeros[state.count]);
                state.bad |= !scales_of(m, along_columns, along_columns ? k : at, along_columns ? at : k,
                                        run.slices, use.factor, scales[state.count]);
                const bool more = along_columns && i + 1 < from.parts && from.part[1].slice_begin < last;
                const Source& source = more ? from : *then.source;
                const int64_t slice = more ? from.part[1].slice_begin : then.begin;
                const Part& next =
                    !along_columns && source.parts == 2 ? source.part[i] : source.part_at(slice);
                const int64_t at_next = next.at + (!along_columns && source.parts == 1 ? i * kLanes : 0);
                const int64_t k_next = (slice - next.slice_begin) * kSlice;
                const int64_t bytes = strip_bytes(next.m.format) / 8;
                run.after =
                    next.m.data + (next.along_columns ? k_next * next.m.row_bytes + at_next * bytes / kSlice
                                                      : at_next * next.m.row_bytes + k_next * bytes / kSlice);
                run.after_row_bytes = next.m.row_bytes;
                ++state.count;
            }
            state.left = slices * (kSlice / MicroF32::kLine);
            state.spread();
        }
        // All columns there, row-major, one format, one direction.
        static bool whole(const Source& source) {
            const Part& a = source.part[0];
            for (int i = 0; i < source.parts; ++i) {
                const Part& part = source.part[i];
                if (part.count < part.halves * kLanes || part.m.format != a.m.format ||
                    part.along_columns != a.along_columns)
                    return false;
                // Along columns both halves of one matrix; along rows a half of each, side by side.
                if (part.along_columns ? part.halves < 2
                                       : part.halves * source.parts != 2 || part.slice_begin != 0)
                    return false;
                const int64_t element = element_bytes(part.m.format);
                if (element > 0 && part.m.col_bytes != element) return false;
            }
            return true;
        }
        void finish() {
            units.finish();
            while (state.run < state.count) {
                use.drain(state, state.runs[state.run].pieces);
                ++state.run;
                state.piece = 0;
            }
            if (state.bad) decode<float>(*wanted.source, wanted.begin, wanted.end, panel);
            state.bad = false;
        }
    };

    static void enter() {}
    static void leave() {}

    static void run(Ahead& ahead, int count, const float* left, int64_t slices, const float* panel,
                    float* tile, bool accumulate, Touch touch) {
        for (int64_t i = 0; i < touch.count; ++i) __builtin_prefetch(touch.lines[i], 0, 2);
        PieceState& state = ahead.state;
        if (state.run < state.count && state.piece == state.runs[state.run].pieces) {
            ++state.run;
            state.piece = 0;
            state.spread();
        }
        state.left -= slices * (kSlice / MicroF32::kLine);
        if (state.run == state.count) return ahead.units.run(count, left, slices, panel, tile, accumulate);
        ahead.use.products(state, count, left, slices, panel, tile, accumulate);
    }
};
