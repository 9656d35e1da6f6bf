// Decoding the next panel inside the micro-kernel of the current one (bfloat16 compute, 16 lanes).
//
// A unit is 8 strips (32 elements of one matrix row each): 8 rows of a panel's columns, or 8 depths of
// it. Done one unit per slice of products, its shuffles, loads and stores hide behind the arithmetic;
// done at once they would add to it.

constexpr int64_t kPanelSlice = kSlice / 2 * kPanelStep;
constexpr int64_t kBf16Units = 4;  // of a slice

// 8 rows n of 32 elements: dwords (pairs along the contraction) of column n at to + pair * kPanelStep.
KT_INLINE void store_unit_of_rows(const __m512i a[8], char* to) {
    const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    __m512i quad[2][4];
    for (int h = 0; h < 2; ++h) {
        const __m512i* r = a + 4 * h;
        const __m512i t0 = _mm512_unpacklo_epi32(r[0], r[1]), t1 = _mm512_unpackhi_epi32(r[0], r[1]);
        const __m512i t2 = _mm512_unpacklo_epi32(r[2], r[3]), t3 = _mm512_unpackhi_epi32(r[2], r[3]);
        // 128-bit lane L of quad[h][j]: pair 4 L + j of the four rows.
        quad[h][0] = _mm512_unpacklo_epi64(t0, t2);
        quad[h][1] = _mm512_unpackhi_epi64(t0, t2);
        quad[h][2] = _mm512_unpacklo_epi64(t1, t3);
        quad[h][3] = _mm512_unpackhi_epi64(t1, t3);
    }
    for (int j = 0; j < 4; ++j) {
        const __m512i low = _mm512_permutex2var_epi64(quad[0][j], first, quad[1][j]);
        const __m512i high = _mm512_permutex2var_epi64(quad[0][j], second, quad[1][j]);
        const auto put = [&](int pair, __m256i v) {
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + pair * kPanelStep), v);
        };
        put(j, _mm512_castsi512_si256(low));
        put(4 + j, _mm512_extracti64x4_epi64(low, 1));
        put(8 + j, _mm512_castsi512_si256(high));
        put(12 + j, _mm512_extracti64x4_epi64(high, 1));
    }
}

// Two depths of 32 columns become a step of pairs.
KT_INLINE void store_step(__m512i depth0, __m512i depth1, char* to) {
    alignas(64) static constexpr uint16_t kFirst[32] = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,
                                                        37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
                                                        11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i low = _mm512_load_si512(kFirst), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    _mm512_storeu_si512(to, _mm512_permutex2var_epi16(depth0, low, depth1));
    _mm512_storeu_si512(to + 64, _mm512_permutex2var_epi16(depth0, high, depth1));
}

inline __m512i round_32(const float* from) {
    return (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + 16), _mm512_loadu_ps(from));
}

// The generic decoders' placing, for whole vectors.
template <>
inline void place_rows<Bf16>(const float* from, Bf16* half) {
    __m512i a[16];
    for (int n = 0; n < 16; ++n) a[n] = round_32(from + n * kSlice);
    store_transposed(a, reinterpret_cast<char*>(half), kPanelStep);
}
template <>
inline void place_step<Bf16>(const float* from, int64_t stride, int64_t width, int64_t step, Bf16* half) {
    char* to = reinterpret_cast<char*>(half) + step * kPanelStep;
    if (width == 2 * kLanes) return store_step(round_32(from), round_32(from + stride), to);
    for (int64_t n = 0; n < width; ++n) {
        const Bf16 pair[2] = {to_bf16(from[n]), to_bf16(from[stride + n])};
        memcpy(to + n * 4, pair, 4);
    }
}

// What is left to decode: runs of whole slices, each of one matrix.
template <int64_t kRuns>
struct AheadState {
    struct Run {
        Matrix m[2];  // along rows: of the halves
        int64_t at[2];
        int64_t slice, slices;  // first slice in the part, slices in this run
        int64_t panels;         // side by side
        Matrix after[2];        // what is decoded when these end, to be fetched from memory before:
        int64_t after_at[2];
        int64_t skip;  // its slices less those that would come next
        char* panel;
        int64_t panel_bytes;  // to the next one

        int64_t units() const { return slices * kBf16Units * panels; }
    };
    Run runs[kRuns];
    int run = 0, count = 0;
    int64_t unit = 0;  // next, in the current run
    // Units are spread over the slices of products: one whenever `due`, which grows by all units with every
    // slice, reaches all slices. Anew with each run, as a tile does not go beyond the end of one.
    int64_t units = 0, slices = 0, due = 0;
    int64_t left = 0;  // slices of products still to come

    void spread() {
        units = 0;
        for (int i = run; i < count; ++i) units += runs[i].units();
        slices = max_of(1, left);
        due = 0;
    }
};

// A step of the products asks for one of the lines; those that do not fit are not asked for.
KT_INLINE void touch_one(Touch& touch) {
    if (touch.count == 0) return;
    _mm_prefetch(*touch.lines++, _MM_HINT_T0);
    --touch.count;
}

// 8 rows of a matrix at one place.
struct Lines {
    const char* from;
    int64_t step;
};

// kSpreads of the micro-kernel K: it asks for the lines itself, one at a time (`far`, `near`); in bursts they
// would hold all of the core's miss buffers and the products' own loads would wait.
//
// Along columns a unit is 8 depths of a panel. K::kPanelsAhead of them are decoded side by side, as rows of
// the matrix lie a page or more apart: their lines are next to each other.
template <Format F, class S, bool kAlongColumns, class K>
struct Job {
    static constexpr int64_t kStripBytes = strip_bytes(F);  // of 8 strips
    static constexpr bool kScattered = kStripBytes % 128 != 0;
    static constexpr bool kSuperBlock = F == Format::q4_k || F == Format::q5_k || F == Format::q6_k;
    static constexpr bool kOwnUnits = requires(const S& s) { s.rows(0, 0, nullptr); };  // if it can
    static constexpr bool kFetches = true;
    static constexpr bool kFetchesNear = !kAlongColumns || kScattered;
    static constexpr _mm_hint kNearHint = kAlongColumns ? _MM_HINT_T1 : _MM_HINT_T0;
    static constexpr bool kSideBySide = kAlongColumns && K::kPanelsAhead > 1;
    using State = AheadState<2 * K::kPanelsAhead>;
    State& state;
    const typename State::Run& run;
    S first, second;
    int64_t unit, run_units, units, slices, due;
    Touch touch;

    Job(State& s, Touch t)
        : state(s),
          run(s.runs[s.run]),
          first(run.m[0]),
          second(run.m[1]),
          unit(s.unit),
          run_units(run.units()),
          units(s.units),
          slices(s.slices),
          due(s.due),
          touch(t) {}
    ~Job() {
        state.unit = unit;
        state.due = due;
    }

    KT_INLINE void step() {
        touch_one(touch);
        bool more = false;
        for (due += units; due >= slices && unit < run_units; ++unit, due -= slices) {
            decode(unit, more);
            more = true;
        }
    }
    // The 8 lines that the first unit of the next step asks for.
    KT_INLINE Lines far() const { return lines(unit + kFar * kBf16Units); }
    // Along rows those of the unit after this one. Along columns the other line of GGUF strips, which
    // straddle lines or have their scales elsewhere in the block.
    KT_INLINE Lines near() const {
        if constexpr (!kAlongColumns) return lines(unit + 1);
        Lines l = lines(unit + kFar * kBf16Units);
        if constexpr (kSuperBlock) {
            const int64_t strip_of_block = run.at[0] / kSlice % 8;
            l.from += (F == Format::q6_k ? 192 : 0) - strip_of_block * kStripBytes / 8;
        } else {
            l.from += kStripBytes / 8 - 1;
        }
        return l;
    }

    KT_INLINE void decode(int64_t u, bool fetch) const {
        __m512i a[8];
        if constexpr (F == Format::int4 && !kAlongColumns) fetch_scales(u + kFar * kBf16Units);
        if constexpr (kAlongColumns) {
            int64_t panel = 0;
            if constexpr (kSideBySide) {
                panel = static_cast<uint32_t>(u) % static_cast<uint32_t>(run.panels);
                u = static_cast<uint32_t>(u) / static_cast<uint32_t>(run.panels);
            }
            const int64_t n = (run.slice + u / kBf16Units) * kSlice + u % kBf16Units * 8,
                          k = run.at[0] + panel * 2 * kLanes;
            char* to = run.panel + u * 4 * kPanelStep;
            if constexpr (kSideBySide) to += panel * run.panel_bytes;
            if constexpr (kSideBySide) {
                fetch_beside(u + kFar * kBf16Units, panel);
            } else if (!K::kSpreads || fetch) {
                const Lines l = lines(u + kFar * kBf16Units);
                for (int i = 0; i < 8; ++i) _mm_prefetch(l.from + i * l.step, _MM_HINT_T1);
            }
            if constexpr (kOwnUnits)
                if (first.depths(n, k, to)) return;
            eight_strips(first, n, k, a);
            for (int i = 0; i < 4; ++i) store_step(a[2 * i], a[2 * i + 1], to + i * kPanelStep);
        } else {
            if (!K::kSpreads || fetch) {
                const Lines l = lines(u + kFar * kBf16Units);
                for (int i = 0; i < 8; ++i) _mm_prefetch(l.from + i * l.step, _MM_HINT_T1);
            }
            const int64_t slice = run.slice + u / kBf16Units;
            const int64_t half = u / 2 % 2, sub = u % 2;
            if (!K::kSpreads || fetch) {
                const Lines l = lines(u + 1);
                for (int i = 0; i < 8; ++i) _mm_prefetch(l.from + i * l.step, _MM_HINT_T0);
            }
            const S& strip = half == 0 ? first : second;
            const int64_t n = run.at[half] + sub * 8, k = slice * kSlice;
            char* to = run.panel + u / kBf16Units * kPanelSlice + half * 64 + sub * 32;
            if constexpr (kOwnUnits)
                if (strip.rows(n, k, to)) return;
            eight_strips(strip, n, k, a);
            store_unit_of_rows(a, to);
        }
    }

    // Each panel's unit asks for some of the 8 rows, for all panels: every line that their columns lie in.
    KT_INLINE void fetch_beside(int64_t u, int64_t panel) const {
        const Lines l = lines(u);
        const auto panels = static_cast<uint32_t>(run.panels);
        const char* row = l.from + 8u * panel / panels * l.step;
        for (int64_t i = 8u * panel / panels; i < 8u * (panel + 1) / panels; ++i, row += l.step) {
            const char* const end = row + run.panels * (kStripBytes / 8);
            for (const char* at = row - reinterpret_cast<uintptr_t>(row) % 64; at < end; at += 64)
                _mm_prefetch(at, _MM_HINT_T1);
        }
    }

    // The memory of a unit, of the first panel. It is fetched far ahead to the L2 cache (not the L1: rows a
    // power of two apart share its sets), and one unit ahead from there to the L1.
    KT_INLINE Lines lines(int64_t u) const {
        const int64_t slice = run.slice + u / kBf16Units, unit_of_slice = u % kBf16Units;
        const bool over = u >= run.slices * kBf16Units;
        const int64_t here = over ? slice + run.skip : slice;
        const int64_t half = kAlongColumns ? 0 : unit_of_slice / 2;
        const Matrix& m = over ? run.after[half] : run.m[half];
        const int64_t at = over ? run.after_at[half] : run.at[half];
        const int64_t n = kAlongColumns ? here * kSlice + unit_of_slice * 8 : at + unit_of_slice % 2 * 8;
        const int64_t k = kAlongColumns ? at : here * kSlice;
        return {reinterpret_cast<const char*>(m.data) + n * m.row_bytes + k / kSlice * kStripBytes / 8,
                m.row_bytes};
    }
    static constexpr int64_t kFar = K::kFarSlices;

    // The scales of a unit of rows, where its slice may be the first with a line of them.
    KT_INLINE void fetch_scales(int64_t u) const {
        const int64_t slice = run.slice + u / kBf16Units, half = u % kBf16Units / 2;
        const bool over = u >= run.slices * kBf16Units;
        const Matrix& m = over ? run.after[half] : run.m[half];
        const int64_t n = (over ? run.after_at[half] : run.at[half]) + u % 2 * 8;
        const int64_t at = first.scales.strips(over ? slice + run.skip : slice) * first.scales.size;
        if (at % 64 != 0) return;
        const char* from = reinterpret_cast<const char*>(m.scales) + n * m.scale_row_bytes + at;
        for (int i = 0; i < 8; ++i, from += m.scale_row_bytes) {
            _mm_prefetch(from, _MM_HINT_T1);
            _mm_prefetch(from + 63, _MM_HINT_T1);  // a row may begin inside a line
        }
    }
};

struct NoJob512 {
    static constexpr bool kFetches = false;
    static constexpr bool kFetchesNear = false;
    static constexpr _mm_hint kNearHint = _MM_HINT_T0;
    Touch touch;
    KT_INLINE void step() { touch_one(touch); }
    static Lines far() { return {}; }
    static Lines near() { return {}; }
};

// Compute side of the instruction sets with bfloat16 products: K is their micro-kernel.
template <class K>
struct ComputeBf16 {
    using T = Bf16;
    using Micro = K;
    using Rows = typename K::Rows;
    using State = AheadState<2 * K::kPanelsAhead>;
    using Products = void (*)(State&, int, const Bf16*, int64_t, const Bf16*, float*, bool, Touch);
    using Drain = void (*)(State&);

    template <Format F, class S, bool kAlongColumns>
    static void products(State& state, int count, const Bf16* left, int64_t slices, const Bf16* panel,
                         float* tile, bool accumulate, Touch touch) {
        Job<F, S, kAlongColumns, K> job(state, touch);
        K::run(count, left, slices, panel, tile, accumulate, job);
    }
    static void products_alone(State&, int count, const Bf16* left, int64_t slices, const Bf16* panel,
                               float* tile, bool accumulate, Touch touch) {
        NoJob512 job{touch};
        K::run(count, left, slices, panel, tile, accumulate, job);
    }
    template <Format F, class S, bool kAlongColumns>
    static void drain(State& state) {
        Job<F, S, kAlongColumns, K> job(state, {});
        for (; job.unit < job.run_units; ++job.unit) job.decode(job.unit, true);
    }

    struct Functions {
        Products products;
        Drain drain;
    };
    template <Format F, class S>
    static constexpr Functions kFunctions[2] = {{products<F, S, false>, drain<F, S, false>},
                                                {products<F, S, true>, drain<F, S, true>}};
    static Functions functions(const Matrix& m, bool along_columns) {
        if (m.format == Format::fp8 && Fp8RowStrip::fits(m))
            return kFunctions<Format::fp8, Fp8RowStrip>[along_columns];
        switch (m.format) {
#define KT_FORMAT(F) \
    case Format::F:  \
        return kFunctions<Format::F, Strip<Format::F>>[along_columns];
            KT_FORMATS(KT_FORMAT)
#undef KT_FORMAT
        }
        return {};
    }

    struct Ahead {
        static constexpr int64_t kPanels = K::kPanelsAhead;  // along columns, at most
        State state;
        Functions use{products_alone, nullptr};

        // Stretches of `count` panels, as deep as each other, are wanted in `panel`, one after the other;
        // `slices` slices of products will run meanwhile. What does not come in whole units is decoded here.
        // `then` is wanted next.
        void start(const Stretch* wanted, int64_t count, Bf16* panel, int64_t slices, const Stretch& then) {
            state = State();
            const Part& model = wanted[0].source->part[0];
            use = functions(model.m, model.along_columns);
            const int64_t panel_size = (wanted[0].end - wanted[0].begin) * kPanelSlice / 2;
            for (int64_t j = 0; j < count; ++j, panel += panel_size) {
                const Source& source = *wanted[j].source;
                if (whole(source) &&
                    functions(source.part[0].m, source.part[0].along_columns).drain == use.drain)
                    add(wanted[j], panel);
                else
                    decode<Bf16>(source, wanted[j].begin, wanted[j].end, panel);
            }
            for (int i = 0; i < state.count; ++i) set_after(state.runs[i], i + 1 < state.count, then);
            state.left = slices;
            state.spread();
            if (state.count == 0) use = {products_alone, nullptr};
        }

        // Whole units of a panel become runs, or go beside those of the panel before; the rest is decoded.
        void add(const Stretch& wanted, Bf16* panel) {
            const Source& source = *wanted.source;
            const int64_t begin = wanted.begin, end = wanted.end;
            const bool along_columns = source.part[0].along_columns;
            const int parts = along_columns ? source.parts : 1;
            for (int i = 0; i < parts; ++i) {
                const Part& part = source.part[i];
                const Part& other = source.part[source.parts - 1];
                const int64_t depth = along_columns ? part.m.rows : part.m.cols;
                const int64_t first = max_of(begin, part.slice_begin), last = min_of(end, part.slice_end);
                if (first >= last) continue;  // nothing of this part in these slices
                const int64_t full = min_of(last, part.slice_begin + depth / kSlice);
                if (full < last) {
                    Bf16* tail = panel + (full - begin) * kPanelSlice / 2;
                    if (along_columns)
                        decode_part<Bf16>(part, full, last, tail);
                    else
                        decode<Bf16>(source, full, last, tail);
                }
                if (full <= first) continue;
                const int64_t slice = first - part.slice_begin;
                char* const to = reinterpret_cast<char*>(panel) + (first - begin) * kPanelSlice;
                if (along_columns && goes_beside(part, slice, full - first, to)) continue;
                typename State::Run& run = state.runs[state.count++];
                run.m[0] = part.m;
                run.m[1] = along_columns ? part.m : other.m;
                run.at[0] = part.at;
                run.at[1] = source.parts == 1 ? part.at + kLanes : other.at;
                run.slice = slice;
                run.slices = full - first;
                run.panels = 1;
                run.panel = to;
                run.panel_bytes = (end - begin) * kPanelSlice;
            }
        }

        // Whether the part's columns follow a run's: then they are decoded with it, into its next panel,
        // `to`.
        bool goes_beside(const Part& part, int64_t slice, int64_t slices, const char* to) {
            for (int i = 0; i < state.count; ++i) {
                typename State::Run& run = state.runs[i];
                if (run.m[0].data == part.m.data && run.slice == slice && run.slices == slices &&
                    run.at[0] + run.panels * 2 * kLanes == part.at &&
                    run.panel + run.panels * run.panel_bytes == to) {
                    ++run.panels;
                    return true;
                }
            }
            return false;
        }

        // What is decoded when a run ends: the next one, or the first panel of `then`.
        void set_after(typename State::Run& run, bool more, const Stretch& then) {
            if (more) {
                const typename State::Run& next = (&run)[1];
                for (int half = 0; half < 2; ++half) {
                    run.after[half] = next.m[half];
                    run.after_at[half] = next.at[half];
                }
                run.skip = next.slice - run.slice - run.slices;
                return;
            }
            const Source& next = *then.source;
            const Part& first = next.part_at(then.begin);
            const Part& other = first.along_columns ? first : next.part[next.parts - 1];
            run.after[0] = first.m;
            run.after[1] = other.m;
            run.after_at[0] = first.at;
            run.after_at[1] = next.parts == 1 ? first.at + kLanes : other.at;
            run.skip = then.begin - first.slice_begin - run.slice - run.slices;
        }

        void finish() {
            while (state.run < state.count) {
                use.drain(state);
                ++state.run;
                state.unit = 0;
            }
            use = {products_alone, nullptr};
        }

        // All columns there, row-major, one decoder, one direction.
        static bool whole(const Source& source) {
            const Part& a = source.part[0];
            for (int i = 0; i < source.parts; ++i) {
                const Part& part = source.part[i];
                if (part.count < part.halves * kLanes || part.m.format != a.m.format ||
                    part.along_columns != a.along_columns)
                    return false;
                // E4M3 has two: gate may have a scale for each row, and up one for many.
                if (Fp8RowStrip::fits(part.m) != Fp8RowStrip::fits(a.m)) return false;
                // Along columns both halves of one matrix; along rows a half of each, side by side.
                if (part.along_columns ? part.halves < 2
                                       : part.halves * source.parts != 2 || part.slice_begin != 0)
                    return false;
                const int64_t element = element_bytes(part.m.format);
                if (element > 0 && part.m.col_bytes != element) return false;
            }
            return true;
        }
    };

    static void enter() { K::enter(); }
    static void leave() { K::leave(); }

    static void run(Ahead& ahead, int count, const Bf16* left, int64_t slices, const Bf16* panel, float* tile,
                    bool accumulate, Touch touch) {
        State& state = ahead.state;
        if (state.run < state.count && state.unit == state.runs[state.run].units()) {
            ++state.run;
            state.unit = 0;
            state.spread();
            if (state.run == state.count) ahead.use.products = products_alone;
        }
        state.left -= slices;
        ahead.use.products(state, count, left, slices, panel, tile, accumulate, touch);
    }
};
