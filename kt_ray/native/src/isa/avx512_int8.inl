// Panels of INT8 products on AVX-512: stored bytes or nibbles become panels unit by unit inside the products
// of the panel before. Needs generic/int8.inl and 16 lanes of 4 bytes; kFlip is xored into every signed byte.

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

// 128 depths of 16 columns, rows of the matrix, as nibbles.
inline void place_nibble_rows(const uint8_t* from, int64_t row_bytes, char* to) {
    const __m512i low = _mm512_set1_epi32(0x0f0f0f0f);
    __m512i a[16];
    for (int n = 0; n < 16; ++n) a[n] = _mm512_loadu_si512(from + n * row_bytes);
    transpose_dwords(a, [&](int k, __m512i v) __attribute__((always_inline)) {
        _mm512_storeu_si512(to + 2 * k * kInt8Step, _mm512_and_si512(v, low));
        _mm512_storeu_si512(to + (2 * k + 1) * kInt8Step, _mm512_and_si512(_mm512_srli_epi32(v, 4), low));
    });
}

// 4 depths of 32 columns, each a row of nibbles that its ratio requantises: one step.
template <uint8_t kFlip>
inline void place_nibble_step(const uint8_t* from, int64_t row_bytes, const float* ratios, char* to) {
    const __m512 values = _mm512_setr_ps(-8.0f, -7.0f, -6.0f, -5.0f, -4.0f, -3.0f, -2.0f, -1.0f, 0.0f, 1.0f,
                                         2.0f, 3.0f, 4.0f, 5.0f, 6.0f, 7.0f);
    const auto row = [&](int n) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + n * row_bytes));
    };
    const auto code = [&](int n) {
        return _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(values, _mm512_set1_ps(ratios[n]))));
    };
    // Rows 0 .. 3 in the 128-bit lanes: their nibbles, and what each of them becomes.
    __m512i v = _mm512_inserti32x4(_mm512_castsi128_si512(row(0)), row(1), 1);
    v = _mm512_inserti32x4(_mm512_inserti32x4(v, row(2), 2), row(3), 3);
    __m512i codes = _mm512_inserti32x4(_mm512_castsi128_si512(code(0)), code(1), 1);
    codes = _mm512_inserti32x4(_mm512_inserti32x4(codes, code(2), 2), code(3), 3);
    if (kFlip != 0) codes = _mm512_xor_si512(codes, _mm512_set1_epi8(static_cast<char>(kFlip)));
    const __m512i low = _mm512_set1_epi8(15);
    const __m512i even = _mm512_shuffle_epi8(codes, _mm512_and_si512(v, low));
    const __m512i odd = _mm512_shuffle_epi8(codes, _mm512_and_si512(_mm512_srli_epi16(v, 4), low));
    // 16 columns of each row, then 4 columns of all rows in each lane, then the rows of a column side by
    // side.
    const __m512i across = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i within =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    const auto store = [&](__m512i columns, char* at) {
        _mm512_storeu_si512(at, _mm512_shuffle_epi8(_mm512_permutexvar_epi32(across, columns), within));
    };
    store(_mm512_unpacklo_epi8(even, odd), to);
    store(_mm512_unpackhi_epi8(even, odd), to + 64);
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
            const int64_t per_byte = part.m.format == Format::int4 ? 2 : 1;
            from += part.along_columns ? depth * row_bytes + part.at / per_byte
                                       : part.at * row_bytes + depth / per_byte;
        }
    };
    // Whole units of one part: along rows 16 columns by 64 stored bytes, else 32 columns by 32 depths.
    struct Run {
        Place here, after;  // `after` will be read when this has been
        int64_t units, halves;
        char* to;
        bool along_columns, nibbles;
        const float* ratios;  // of nibbles along columns

        const uint8_t* unit(const Place& place, int64_t u) const {
            if (along_columns) return place.from + u * kSlice * place.row_bytes;
            return place.from + u % halves * kLanes * place.row_bytes + u / halves * kInt8Line;
        }
        // Lines that are read four lines of depth later, into the L2 cache: many rows a power of two apart
        // share the sets of the L1. Inlined, as GCC drops calls to functions that only prefetch.
        [[gnu::always_inline]] void fetch(int64_t u) const {
            u += 4 * halves;
            const bool over = u >= units;
            const Place& place = over ? after : here;
            const uint8_t* from = unit(place, over ? u - units : u);
            for (int64_t n = 0; n < (along_columns ? kSlice : kLanes); ++n)
                _mm_prefetch(reinterpret_cast<const char*>(from + n * place.row_bytes), _MM_HINT_T1);
        }
    };
    Ratios ratios;
    Run runs[2];
    int run = 0, count = 0;
    int64_t unit = 0;  // next, in the current run
    // Units are spread over the lines of products: one whenever `due`, which grows by all units with every
    // line, reaches all lines.
    int64_t units = 0, lines = 0, due = 0;

    explicit Int8Ahead512(const Ratios& scratch) : ratios(scratch) {}

    // What does not come in whole lines and columns is decoded here.
    void start(const Stretch& wanted, int8_t* panel, int64_t slices, const Stretch& then) {
        run = count = 0;
        unit = units = due = 0;
        const Source& source = *wanted.source;
        const int64_t begin = wanted.begin, end = wanted.end;
        ratios.prepare(source, begin, end);
        if (has_nibbles(source))
            decode_group_scales(source, begin, end,
                                reinterpret_cast<float*>(panel + panel_size<int8_t>(end - begin)));
        const Place next(then.source->part_at(then.begin), then.begin);
        for (int i = 0; i < source.parts; ++i) {
            const Part& part = source.part[i];
            const Matrix& m = part.m;
            const int64_t first = max_of(begin, part.slice_begin), last = min_of(end, part.slice_end);
            if (first >= last) continue;
            const int64_t depth = (first - part.slice_begin) * kSlice;
            const int64_t there = (part.along_columns ? m.rows : m.cols) - depth;
            const bool nibbles = m.format == Format::int4;
            // Along rows 64 bytes of nibbles are two lines.
            const int64_t lines_each = nibbles && !part.along_columns ? 2 : 1;
            int64_t whole = min_of(there, (last - first) * kSlice) / (lines_each * kInt8Line) * lines_each;
            if (part.count < part.halves * kLanes || (part.along_columns && part.halves < 2)) whole = 0;
            int8_t* to = panel + (first - begin) * kSlice / 4 * kInt8Step;
            if (whole > 0) {
                Run& r = runs[count];
                r.here = Place(part, first);
                r.after = next;
                if (count > 0) runs[count - 1].after = r.here;
                r.along_columns = part.along_columns;
                r.halves = part.halves;
                r.nibbles = nibbles;
                r.ratios = ratios.of(part) + depth;
                r.units = whole / lines_each * part.halves;
                r.to = reinterpret_cast<char*>(to) + part.half * 64;
                units += r.units;
                ++count;
            }
            decode_int8<kFlip>(part, ratios, first + 2 * whole, last, to + whole * kInt8Line / 4 * kInt8Step);
        }
        lines = slices / 2;
    }

    void place() {
        const Run& r = runs[run];
        const uint8_t* from = r.unit(r.here, unit);
        r.fetch(unit);
        if (r.along_columns) {
            char* to = r.to + unit * (kSlice / 4) * kInt8Step;
            const float* ratio = r.ratios + unit * kSlice;
            for (int64_t q = 0; q < kSlice; q += 4, to += kInt8Step) {
                const uint8_t* rows = from + q * r.here.row_bytes;
                if (r.nibbles)
                    place_nibble_step<kFlip>(rows, r.here.row_bytes, ratio + q, to);
                else
                    place_int8_step<kFlip>(rows, r.here.row_bytes, to);
            }
        } else {
            char* to = r.to + unit % r.halves * 64;
            if (r.nibbles)
                place_nibble_rows(from, r.here.row_bytes, to + unit / r.halves * (kInt8Line / 2) * kInt8Step);
            else
                place_int8_rows<kFlip>(from, r.here.row_bytes,
                                       to + unit / r.halves * (kInt8Line / 4) * kInt8Step);
        }
        if (++unit == r.units) {
            unit = 0;
            ++run;
        }
    }

    void step() {
        for (due += units; due >= lines && run < count; due -= lines) place();
    }
    void finish() {
        while (run < count) place();
    }
};
