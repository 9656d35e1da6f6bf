// INT8 panels on AVX-512: stored bytes become panels unit by unit inside the products of the panel before.
// Needs generic/int8.inl and 16 lanes of 4 bytes; kFlip is xored into every byte.

constexpr int64_t kInt8Step = 128;  // bytes of a panel
constexpr int64_t kInt8Line = 64;   // depths

// 64 depths of 16 columns, rows of the matrix.
template <uint8_t kFlip>
inline void place_int8_rows(const uint8_t* from, int64_t row_bytes, char* to) {
    __m512i a[16];
    for (int n = 0; n < 16; ++n) {
        a[n] = _mm512_loadu_si512(from + n * row_bytes);
        if (kFlip != 0) a[n] = _mm512_xor_si512(a[n], _mm512_set1_epi8(static_cast<char>(kFlip)));
    }
    store_transposed(a, to, kInt8Step);
}

// 4 depths of 32 columns, each a row of the matrix: one step.
template <uint8_t kFlip>
inline void place_int8_step(const uint8_t* from, int64_t row_bytes, char* to) {
    alignas(64) static constexpr uint16_t kWords[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                        21, 6,  22, 7,  23, 32, 48, 33, 49, 34, 50,
                                                        35, 51, 36, 52, 37, 53, 38, 54, 39, 55};
    const auto row = [&](int n) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + n * row_bytes));
    };
    __m512i even = _mm512_inserti64x4(_mm512_castsi256_si512(row(0)), row(2), 1);
    __m512i odd = _mm512_inserti64x4(_mm512_castsi256_si512(row(1)), row(3), 1);
    if (kFlip != 0) {
        const __m512i flip = _mm512_set1_epi8(static_cast<char>(kFlip));
        even = _mm512_xor_si512(even, flip);
        odd = _mm512_xor_si512(odd, flip);
    }
    // 128-bit lanes of words (depths 0 and 1 of a column): columns 0 and 16 on, then depths 2 and 3.
    const __m512i low = _mm512_unpacklo_epi8(even, odd), high = _mm512_unpackhi_epi8(even, odd);
    const __m512i first = _mm512_load_si512(kWords), second = _mm512_add_epi16(first, _mm512_set1_epi16(8));
    _mm512_storeu_si512(to, _mm512_permutex2var_epi16(low, first, high));
    _mm512_storeu_si512(to + 64, _mm512_permutex2var_epi16(low, second, high));
}

template <uint8_t kFlip>
struct Int8Ahead512 {
    // Stored bytes of a part from some depth on.
    struct Place {
        const uint8_t* from = nullptr;
        int64_t row_bytes = 0;

        Place() = default;
        Place(const Part& part, int64_t slice) : from(part.m.data), row_bytes(part.m.row_bytes) {
            const int64_t depth = (slice - part.slice_begin) * kSlice;
            from += part.along_columns ? depth * row_bytes + part.at : part.at * row_bytes + depth;
        }
    };
    // Whole lines of one part, as units: along rows 16 columns by 64 depths, else 32 columns by 32.
    struct Run {
        Place here, after;  // `after` will be read when this has been
        int64_t units, halves;
        char* to;
        bool along_columns;

        const uint8_t* unit(const Place& place, int64_t u) const {
            if (along_columns) return place.from + u * kSlice * place.row_bytes;
            return place.from + u % halves * kLanes * place.row_bytes + u / halves * kInt8Line;
        }
        // Lines that are read four lines of depth later, into the L2 cache: many rows a power of two apart
        // share the sets of the L1.
        void fetch(int64_t u) const {
            u += 4 * halves;
            const bool over = u >= units;
            const Place& place = over ? after : here;
            const uint8_t* from = unit(place, over ? u - units : u);
            for (int64_t n = 0; n < (along_columns ? kSlice : kLanes); ++n)
                _mm_prefetch(reinterpret_cast<const char*>(from + n * place.row_bytes), _MM_HINT_T1);
        }
    };
    Run runs[2];
    int run = 0, count = 0;
    int64_t unit = 0;   // next, in the current run
    int64_t quota = 0;  // units per line of products

    // What does not come in whole lines and columns is decoded here.
    void start(const Stretch& wanted, int8_t* panel, int64_t slices, const Stretch& then) {
        run = count = 0;
        unit = 0;
        int64_t units = 0;
        const Source& source = *wanted.source;
        const int64_t begin = wanted.begin, end = wanted.end;
        const Place next(then.source->part_at(then.begin), then.begin);
        for (int i = 0; i < source.parts; ++i) {
            const Part& part = source.part[i];
            const Matrix& m = part.m;
            const int64_t first = max_of(begin, part.slice_begin), last = min_of(end, part.slice_end);
            if (first >= last) continue;
            const int64_t depth = (first - part.slice_begin) * kSlice;
            const int64_t there = (part.along_columns ? m.rows : m.cols) - depth;
            int64_t lines = min_of(there, (last - first) * kSlice) / kInt8Line;
            if (part.count < part.halves * kLanes || (part.along_columns && part.halves < 2)) lines = 0;
            int8_t* to = panel + (first - begin) * kSlice / 4 * kInt8Step;
            if (lines > 0) {
                Run& r = runs[count];
                r.here = Place(part, first);
                r.after = next;
                if (count > 0) runs[count - 1].after = r.here;
                r.along_columns = part.along_columns;
                r.halves = part.halves;
                r.units = lines * part.halves;
                r.to = reinterpret_cast<char*>(to) + part.half * 64;
                units += r.units;
                ++count;
            }
            decode_int8<kFlip>(part, first + 2 * lines, last, to + lines * kInt8Line / 4 * kInt8Step);
        }
        quota = slices == 0 ? 0 : pieces(2 * units, slices);
    }

    void place() {
        const Run& r = runs[run];
        const uint8_t* from = r.unit(r.here, unit);
        r.fetch(unit);
        if (r.along_columns) {
            char* to = r.to + unit * (kSlice / 4) * kInt8Step;
            for (int64_t q = 0; q < kSlice / 4; ++q)
                place_int8_step<kFlip>(from + 4 * q * r.here.row_bytes, r.here.row_bytes, to + q * kInt8Step);
        } else {
            const int64_t line = unit / r.halves, half = unit % r.halves;
            place_int8_rows<kFlip>(from, r.here.row_bytes,
                                   r.to + line * (kInt8Line / 4) * kInt8Step + half * 64);
        }
        if (++unit == r.units) {
            unit = 0;
            ++run;
        }
    }

    void step() {
        for (int64_t q = 0; q < quota && run < count; ++q) place();
    }
    void finish() {
        while (run < count) place();
    }
};
