// Panel decoders: a block of a stored matrix becomes what the micro-kernel eats, in either orientation,
// so that one copy of the weights serves forward and backward.
//
// A panel holds 2 * kLanes columns, [step][2][kLanes][kPack]: two vectors per step, each lane with kPack
// consecutive elements of the contraction. Depth goes in slices of kSlice elements; columns and depths
// beyond the matrix are zero.

constexpr int64_t kSlice = 32;

// A matrix' contribution to a panel: along its rows (contraction over k, as in W x) or along its
// columns (contraction over n, as in W^T x).
struct Part {
    Matrix m;
    bool along_columns;
    int64_t at, count;               // first row or column of the matrix in the panel, and how many there are
    int64_t half;                    // first half of the panel that is filled
    int64_t halves;                  // 1 or 2
    int64_t slice_begin, slice_end;  // where in the panel's depth
};

struct Source {
    Part part[2];
    int parts;

    // The part that slice `slice` is of: along columns one follows the other.
    const Part& part_at(int64_t slice) const {
        return part[parts == 2 && part[1].along_columns && slice >= part[1].slice_begin ? 1 : 0];
    }
};

// Slices [begin, end) of a source.
struct Stretch {
    const Source* source;
    int64_t begin, end;
};

inline int64_t element_bytes(Format format) {
    return format == Format::f32 ? 4 : format == Format::bf16 ? 2 : 0;
}

inline Part make_part(const Matrix& m, bool along_columns, int64_t at, int64_t half, int64_t halves,
                      int64_t slice_begin) {
    Part part{m, along_columns, at, 0, half, halves, slice_begin, 0};
    if (element_bytes(m.format) > 0 && m.col_bytes > m.row_bytes) {  // stored transposed
        part.m.rows = m.cols;
        part.m.cols = m.rows;
        part.m.row_bytes = m.col_bytes;
        part.m.col_bytes = m.row_bytes;
        part.along_columns = !along_columns;
    }
    const int64_t width = part.along_columns ? part.m.cols : part.m.rows;
    const int64_t depth = part.along_columns ? part.m.rows : part.m.cols;
    part.count = max_of(0, min_of(halves * kLanes, width - at));
    part.slice_end = slice_begin + pieces(depth, kSlice);
    return part;
}

template <class T>
constexpr int64_t pack_of() {
    return 4 / static_cast<int64_t>(sizeof(T));
}
template <class T>
constexpr int64_t step_size() {
    return 2 * kLanes * pack_of<T>();
}

// Places [kLanes][kSlice] floats into one half of a slice: column n is row n of `from`.
template <class T>
void place_rows(const float* from, T* half) {
    static_assert(sizeof(T) == sizeof(float), "an instruction set that multiplies bfloat16 brings its own");
    for (int64_t k = 0; k < kSlice; k += kLanes)
        transpose_block(from + k, kSlice, half + k * step_size<T>(), step_size<T>());
}

// Places kPack consecutive depths, `width` floats each at from + q * stride, at step `step` of a slice.
template <class T>
void place_step(const float* from, int64_t /*stride*/, int64_t width, int64_t step, T* half) {
    static_assert(sizeof(T) == sizeof(float), "an instruction set that multiplies bfloat16 brings its own");
    memcpy(half + step * step_size<T>(), from, width * sizeof(T));
}

// Slices are decoded in two units each, so that products of another panel can run between: a half of the
// columns along rows, half of the depths along columns.
constexpr int64_t kUnits = 2;
constexpr int64_t kUnitDepth = kSlice / kUnits;

// Unit `unit` of slice s of a panel, at `slice`.
template <Format F, class T>
void decode_unit(const Part& part, int64_t s, int64_t unit, T* slice) {
    constexpr int64_t kPack = pack_of<T>();
    const Matrix& m = part.m;
    const int64_t depth = (s - part.slice_begin) * kSlice;
    alignas(64) float buffer[kLanes * kSlice];
    if (!part.along_columns) {
        const int64_t half = unit - part.half;
        if (half < 0 || half >= part.halves) return;
        const int64_t n_depth = min_of(kSlice, m.cols - depth);
        const int64_t columns = max_of(0, min_of(kLanes, part.count - half * kLanes));
        if (columns < kLanes || n_depth < kSlice) memset(buffer, 0, sizeof(buffer));
        for (int64_t n = 0; n < columns; ++n)
            strip<F>(m, part.at + half * kLanes + n, depth, n_depth, buffer + n * kSlice);
        place_rows<T>(buffer, slice + unit * kLanes * kPack);
    } else {
        const int64_t begin = unit * kUnitDepth, n_depth = m.rows - depth;
        const int64_t start = part.at / kSlice * kSlice, skip = part.at - start;
        for (int64_t q = begin; q < begin + kUnitDepth; q += kPack) {
            for (int64_t j = 0; j < kPack * 2 * kSlice; ++j) buffer[j] = 0.0f;
            for (int64_t r = 0; r < kPack && q + r < n_depth; ++r) {
                float* row = buffer + r * 2 * kSlice;
                for (int64_t k = start; k < part.at + part.count; k += kSlice)
                    strip<F>(m, depth + q + r, k, min_of(kSlice, m.cols - k), row + k - start);
                for (int64_t n = part.count; n < part.halves * kLanes; ++n) row[skip + n] = 0.0f;
            }
            place_step<T>(buffer + skip, 2 * kSlice, part.halves * kLanes, q / kPack,
                          slice + part.half * kLanes * kPack);
        }
    }
}

template <class T>
using DecodeUnit = void (*)(const Part&, int64_t, int64_t, T*);
template <class T>
DecodeUnit<T> unit_decoder(Format format) {
#define KT_FORMAT(F) decode_unit<Format::F, T>,
    static constexpr DecodeUnit<T> decoders[] = {KT_FORMATS(KT_FORMAT)};
#undef KT_FORMAT
    return decoders[static_cast<int>(format)];
}

// Slices [begin, end) of the panel; `panel` is where slice `begin` starts.
template <class T>
void decode_part(const Part& part, int64_t begin, int64_t end, T* panel) {
    const DecodeUnit<T> decode = unit_decoder<T>(part.m.format);
    for (int64_t s = max_of(begin, part.slice_begin); s < min_of(end, part.slice_end); ++s)
        for (int64_t unit = 0; unit < kUnits; ++unit)
            decode(part, s, unit, panel + (s - begin) * kSlice / pack_of<T>() * step_size<T>());
}

template <class T>
void decode(const Source& source, int64_t begin, int64_t end, T* panel) {
    for (int i = 0; i < source.parts; ++i) decode_part<T>(source.part[i], begin, end, panel);
}
