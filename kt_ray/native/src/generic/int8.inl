// INT8 products (W8A8): rows of activations are quantised as they are packed, the stored bytes of
// per-channel int8 weights become panels as they are, sums are exact in int32 and so the same on every
// instruction set. Only the frozen products change; everything else runs on a compute side C.
// Included after ahead.inl.

// What the frozen products of a compute side run on: itself unless it says otherwise.
template <class C>
concept Quantised = requires { typename C::Frozen; };
template <class C>
struct FrozenOf {
    using Type = C;
};
template <Quantised C>
struct FrozenOf<C> {
    using Type = typename C::Frozen;
};
template <class C>
using Frozen = typename FrozenOf<C>::Type;

// Slices in a line of a packed left operand, at least one: depths and cuts of a panel are multiples.
template <class T>
constexpr int64_t line_slices() {
    return sizeof(T) == 1 ? 2 : 1;
}
// The depth of a packed left operand of the frozen products, from that of C.
template <class T>
int64_t line_depth(int64_t depth) {
    return pieces(depth, line_slices<T>() * kSlice) * line_slices<T>() * kSlice;
}

// Packed and quantised rows of a block.
template <class T>
struct QuantisedLeft {
    const T* data;
    const RowScale* rows;
    QuantisedLeft operator+(int64_t elements) const { return {data + elements, rows}; }
};

// Nearest even multiple of the scale, that of the largest magnitude being 127 times it. `depth` is whole
// lines, which go to `to` and each `stride` elements further. A row that is not finite gets a NaN as its
// scale, and so do all its results.
template <class T>
RowScale quantise_row(const float* v, int64_t depth, T* to, int64_t stride) {
    constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(T));
    constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    uint32_t largest = 0;
    for (int64_t k = 0; k < depth; ++k) {
        const uint32_t magnitude = float_bits(v[k]) & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    const bool finite = largest < 0x7f800000u;
    RowScale row{finite ? bits_float(largest) / 127.0f : bits_float(0x7fc00000u), 0};
    const bool zero = !finite || row.scale == 0.0f;
    const float divisor = zero ? 1.0f : row.scale;
    for (int64_t k = 0; k < depth; k += kLine, to += stride) {
        int32_t sum = 0;
        for (int64_t j = 0; j < kLine; ++j) {
            int32_t q = static_cast<int32_t>(float_bits(v[k + j] / divisor + kRound) - float_bits(kRound));
            q = q < -127 ? -127 : q;
            q = q > 127 ? 127 : q;
            q = zero ? 0 : q;
            to[j] = static_cast<T>(q);
            sum += q;
        }
        row.sum += sum;
    }
    return row;
}

// Scales of a matrix' channels, its rows n.
inline void channel_scales(const Matrix& m, float* to) {
    for (int64_t n = 0; n < m.rows; ++n) to[n] = scale_value(m.scale_type, m.scales + n * m.scale_row_bytes);
}

// Stored bytes of slices [begin, end) into a panel that starts at slice `begin`; kFlip is xored into each.
// Columns and depths beyond the matrix are left as they are: such columns are given the scale 0, and the
// left operand is zero in such depths.
template <uint8_t kFlip, class T>
void decode_int8(const Part& part, int64_t begin, int64_t end, T* panel) {
    constexpr int64_t kPack = pack_of<T>();
    const auto value = [](uint8_t byte) {
        return static_cast<T>(static_cast<int8_t>(static_cast<uint8_t>(byte ^ kFlip)));
    };
    const Matrix& m = part.m;
    const int64_t depth = part.along_columns ? m.rows : m.cols;
    for (int64_t s = max_of(begin, part.slice_begin); s < min_of(end, part.slice_end); ++s) {
        T* slice = panel + (s - begin) * kSlice / kPack * step_size<T>() + part.half * kLanes * kPack;
        const int64_t first = (s - part.slice_begin) * kSlice, last = min_of(depth, first + kSlice);
        if (part.along_columns) {
            for (int64_t n = first; n < last; ++n) {
                const uint8_t* from = m.data + n * m.row_bytes + part.at;
                T* to = slice + (n - first) / kPack * step_size<T>() + (n - first) % kPack;
                for (int64_t j = 0; j < part.count; ++j) to[j * kPack] = value(from[j]);
            }
        } else {
            for (int64_t j = 0; j < part.count; ++j) {
                const uint8_t* from = m.data + (part.at + j) * m.row_bytes;
                for (int64_t k = first; k < last; ++k)
                    slice[(k - first) / kPack * step_size<T>() + j * kPack + (k - first) % kPack] =
                        value(from[k]);
            }
        }
    }
}

template <uint8_t kFlip, class T>
struct PlainInt8Ahead {
    Stretch wanted{};
    T* panel = nullptr;

    void start(const Stretch& now, T* to, int64_t /*slices*/, const Stretch& /*then*/) {
        wanted = now;
        panel = to;
    }
    void step() {}
    void finish() {
        const Source* const source = wanted.source;
        if (source == nullptr) return;
        for (int i = 0; i < source->parts; ++i)
            decode_int8<kFlip>(source->part[i], wanted.begin, wanted.end, panel);
        wanted.source = nullptr;
    }
};

// The frozen products of ComputeInt8. Tiles hold int32 sums until complete().
template <class M, class A>
struct Int8Products {
    using T = typename M::T;
    using Micro = M;
    using Ahead = A;

    struct Job {
        Ahead& ahead;
        Later* later;
        void step() {
            if constexpr (M::kInPassing)
                if (later != nullptr && later->bits > 0) later->do_bit(*later);
            ahead.step();
        }
    };
    static void run(Ahead& ahead, int count, const QuantisedLeft<T>& left, int64_t slices, const T* panel,
                    float* tile, bool accumulate, Touch touch) {
        for (int64_t i = 0; i < touch.count; ++i) __builtin_prefetch(touch.lines[i], 0, 2);
        Job job{ahead, touch.later};
        M::run(count, left.data, slices / line_slices<T>(), panel, reinterpret_cast<int32_t*>(tile),
               accumulate, job);
    }

    // The sums times the scales of their rows and, where the panel's columns are channels, of these.
    static void complete(const Source& source, int count, const QuantisedLeft<T>& left, float* tile) {
        float columns[2 * kLanes] = {};
        for (int i = 0; i < source.parts; ++i) {
            const Part& part = source.part[i];
            const Matrix& m = part.m;
            for (int64_t n = 0; n < part.count; ++n)
                columns[part.half * kLanes + n] =
                    part.along_columns
                        ? 1.0f
                        : scale_value(m.scale_type, m.scales + (part.at + n) * m.scale_row_bytes);
        }
        for (int i = 0; i < count; ++i, tile += 2 * kLanes) {
            int32_t sums[2 * kLanes];
            memcpy(sums, tile, sizeof(sums));
            const RowScale row = left.rows[i];
            const int32_t offset = M::kOffset * row.sum;
            for (int64_t j = 0; j < 2 * kLanes; ++j) {
                // Modulo 2^32: what the offset added may have run over.
                const int32_t sum =
                    static_cast<int32_t>(static_cast<uint32_t>(sums[j]) - static_cast<uint32_t>(offset));
                tile[j] = static_cast<float>(sum) * row.scale * columns[j];
            }
        }
    }
};

// A compute side whose frozen products are INT8.
template <class Base, class M, class A>
struct ComputeInt8 : Base {
    using Frozen = Int8Products<M, A>;
};

// The part of a thread's scratch that only quantised products need.
template <class T, class Take, class Scratch>
void take_quantised(const Pass& p, int64_t max_slices, const Take& take, Scratch* s) {
    const int64_t widest = line_depth<T>(max_of(p.hidden_pad, p.parts * p.inter_pad));
    const int64_t panel = min_of(widest / kSlice, max_slices) * kSlice / pack_of<T>() * step_size<T>();
    char* panel0 = take(panel, sizeof(T));
    char* panel1 = take(panel, sizeof(T));
    char* packed = take(p.span_rows * line_depth<T>(p.hidden_pad), sizeof(T));
    char* rows = take(p.span_rows, sizeof(RowScale));
    char* row = take(widest, sizeof(float));
    char* channels = take(widest, sizeof(float));
    if (s == nullptr) return;
    s->frozen_panel[0] = reinterpret_cast<T*>(panel0);
    s->frozen_panel[1] = reinterpret_cast<T*>(panel1);
    s->quantised = reinterpret_cast<T*>(packed);
    s->quantised_rows = reinterpret_cast<RowScale*>(rows);
    s->row = reinterpret_cast<float*>(row);
    s->channels = reinterpret_cast<float*>(channels);
}

// Bytes of an element of a quantised left operand, 0 where there is none.
template <class C>
constexpr int64_t quantised_size() {
    return Quantised<C> ? static_cast<int64_t>(sizeof(typename Frozen<C>::T)) : 0;
}
