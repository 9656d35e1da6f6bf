// INT8 products: rows of activations are quantised as they are packed, panels hold integers, sums are exact
// in int32 and so the same on every instruction set. Only the frozen products change; everything else runs on
// a compute side C. Included after ahead.inl.
//
// Per-channel int8 weights (W8A8) are panels as they are stored. int4 weights (W4A8) along rows are panels of
// nibbles 0 .. 15, times rows quantised in groups of kSlice; along columns they are requantised to int8 with
// one scale per channel, so that a sum over channels is one of integers.

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

// Elements of a panel of so many slices.
template <class T>
constexpr int64_t panel_size(int64_t slices) {
    return slices * kSlice / pack_of<T>() * step_size<T>();
}

// Packed and quantised rows of a block: `rows` [count], or [slice][count] where slices have their own scales.
template <class T>
struct QuantisedLeft {
    const T* data;
    const RowScale* rows;
    bool in_groups;
    QuantisedLeft operator+(int64_t elements) const {
        return {data + elements, rows + (in_groups ? elements / kSlice : 0), in_groups};
    }
};

// Nearest even multiple of the scale, that of the largest magnitude being 127 times it. `depth` is whole runs
// of kRun elements, which go to `to` and each `stride` elements further; the panel is raised by kRaised. What
// is not finite gets a NaN as its scale, and so do all results of its row.
template <int64_t kRun, int kRaised, class T>
RowScale quantise_row(const float* v, int64_t depth, T* to, int64_t stride) {
    constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    uint32_t largest = 0;
    for (int64_t k = 0; k < depth; ++k) {
        const uint32_t magnitude = float_bits(v[k]) & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    const bool finite = largest < 0x7f800000u;
    const float scale = finite ? bits_float(largest) / 127.0f : bits_float(0x7fc00000u);
    const bool zero = !finite || scale == 0.0f;
    const float divisor = zero ? 1.0f : scale;
    uint32_t start = 0;
    for (int64_t k = 0; k < depth; k += kRun, to += stride) {
        int32_t sum = 0;
        for (int64_t j = 0; j < kRun; ++j) {
            int32_t q = static_cast<int32_t>(float_bits(v[k + j] / divisor + kRound) - float_bits(kRound));
            q = q < -127 ? -127 : q;
            q = q > 127 ? 127 : q;
            q = zero ? 0 : q;
            to[j] = static_cast<T>(q);
            sum += q;
        }
        start -= static_cast<uint32_t>(kRaised * sum);
    }
    return {scale, static_cast<int32_t>(start)};
}

// Eight nibbles in a dword come apart by shifts: so many, and what one of them leaves in a lane of a panel.
template <class T>
constexpr int64_t kNibbleShifts = 8 / pack_of<T>();
template <class T>
constexpr uint32_t kNibbleMask = sizeof(T) == 1 ? 0x0f0f0f0fu : 0x000f000fu;

// A group of kSlice, in the order in which nibbles come apart.
template <class T>
RowScale quantise_group(const float* v, T* to) {
    constexpr int64_t kPack = pack_of<T>(), kShifts = kNibbleShifts<T>;
    T q[kSlice];
    const RowScale scale = quantise_row<kSlice, 8>(v, kSlice, q, 0);
    for (int64_t eight = 0; eight < kSlice; eight += 8)
        for (int64_t i = 0; i < kShifts; ++i)
            for (int64_t j = 0; j < kPack; ++j) to[eight + i * kPack + j] = q[eight + j * kShifts + i];
    return scale;
}

// The largest magnitude among the scales of row n, a NaN if there is one.
inline float largest_scale(const Matrix& m, int64_t n) {
    const uint8_t* from = m.scales + n * m.scale_row_bytes;
    const int64_t count = pieces(m.cols, m.block_cols);
    if (m.scale_type == ScaleType::f32) {
        uint32_t largest = 0;
        for (int64_t j = 0; j < count; ++j) {
            const uint32_t magnitude = load_as<uint32_t>(from + 4 * j) & 0x7fffffffu;
            largest = magnitude > largest ? magnitude : largest;
        }
        return bits_float(largest);
    }
    uint16_t largest = 0;
    for (int64_t j = 0; j < count; ++j) {
        const uint16_t magnitude = load_as<uint16_t>(from + 2 * j) & 0x7fffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    return scale_value(m.scale_type, reinterpret_cast<const uint8_t*>(&largest));
}

// Scales of a matrix' channels, its rows n, as panels along columns have them: those of int4 make -8 times
// the largest scale of the row -127.
inline void channel_scales(const Matrix& m, float* to) {
    if (m.format == Format::int4)
        for (int64_t n = 0; n < m.rows; ++n) to[n] = largest_scale(m, n) * (8.0f / 127.0f);
    else
        for (int64_t n = 0; n < m.rows; ++n)
            to[n] = scale_value(m.scale_type, m.scales + n * m.scale_row_bytes);
}

// What requantising panels of int4 along columns needs: scales over those of their channels.
struct Ratios {
    float* channels = nullptr;  // by the panel's depth, of the matrices seen last
    float* ratios = nullptr;    // the same, of the columns of the panel that is decoded
    const uint8_t* seen[2] = {};

    Ratios() = default;
    Ratios(float* channels_, float* ratios_) : channels(channels_), ratios(ratios_) {}

    // All columns of a panel share a group.
    void prepare(const Source& source, int64_t begin, int64_t end) {
        for (int i = 0; i < source.parts; ++i) {
            const Part& part = source.part[i];
            const Matrix& m = part.m;
            if (m.format != Format::int4 || !part.along_columns) continue;
            float *const channel = channels + part.slice_begin * kSlice, *const ratio = of(part);
            if (seen[i] != m.scales) channel_scales(m, channel);
            seen[i] = m.scales;
            const int64_t first = max_of(0, begin - part.slice_begin) * kSlice,
                          last = min_of(m.rows, (end - part.slice_begin) * kSlice);
            if (first >= last) continue;
            column_scales(m, first, part.at, last - first, ratio + first);
            // Sizes of int4 matrices are multiples of 32.
            for (int64_t n = first; n < last; n += kLanes) {
                const Vec most = vset1(127.0f / 8.0f), channel_n = vload(channel + n);
                Vec r = vload(ratio + n) / channel_n;
                r = vselect(r > most, most, r);
                r = vselect(r < -most, -most, r);
                vstore(ratio + n, vselect((channel_n > 0.0f) & (r == r), r, vset1(0.0f)));
            }
        }
    }
    // By the part's own depth.
    float* of(const Part& part) const { return ratios + part.slice_begin * kSlice; }
};

// Nibbles 0 .. 15 of slices [begin, end) into a panel that starts at slice `begin`.
template <class T>
void decode_nibbles(const Part& part, int64_t begin, int64_t end, T* panel) {
    const Matrix& m = part.m;
    for (int64_t s = max_of(begin, part.slice_begin); s < min_of(end, part.slice_end); ++s) {
        T* slice = panel + panel_size<T>(s - begin) + part.half * kLanes * pack_of<T>();
        for (int64_t n = 0; n < part.count; ++n) {
            const uint8_t* from = block_at<Format::int4>(m, part.at + n, (s - part.slice_begin) * kSlice);
            T* to = slice + n * pack_of<T>();
            for (int64_t d = 0; d < kSlice / 8; ++d) {
                const uint32_t v = load_as<uint32_t>(from + 4 * d);
                for (int64_t i = 0; i < kNibbleShifts<T>; ++i, to += step_size<T>()) {
                    const uint32_t lane = v >> (4 * i) & kNibbleMask<T>;
                    memcpy(to, &lane, sizeof(lane));
                }
            }
        }
    }
}

// Scales of row n in kLanes slices.
inline void row_scales(const Matrix& m, int64_t n, int64_t slice, float* to) {
    const uint8_t* from = m.scales + n * m.scale_row_bytes + slice * scale_size(m.scale_type);
    if (m.scale_type == ScaleType::f32)
        memcpy(to, from, kLanes * sizeof(float));
    else if (m.scale_type == ScaleType::bf16)
        vstore(to, vload(reinterpret_cast<const Bf16*>(from)));
    else
        for (int64_t j = 0; j < kLanes; ++j) to[j] = scale_value(m.scale_type, from + 2 * j);
}

// Scales of a panel of nibbles, [slice][2 * kLanes], zero where the matrix ends. They follow the panel.
inline void decode_group_scales(const Source& source, int64_t begin, int64_t end, float* to) {
    memset(to, 0, (end - begin) * 2 * kLanes * sizeof(float));
    for (int i = 0; i < source.parts; ++i) {
        const Part& part = source.part[i];
        const Matrix& m = part.m;
        float* const half = to + part.half * kLanes - begin * 2 * kLanes;
        const int64_t last = min_of(end, part.slice_end);
        int64_t s = max_of(begin, part.slice_begin);
        if (m.block_cols == kSlice && part.count == part.halves * kLanes)
            for (; s + kLanes <= last; s += kLanes)
                for (int64_t n = 0; n < part.count; n += kLanes) {
                    float rows[kLanes * kLanes];
                    for (int64_t j = 0; j < kLanes; ++j)
                        row_scales(m, part.at + n + j, s - part.slice_begin, rows + j * kLanes);
                    transpose_block(rows, kLanes, half + s * 2 * kLanes + n, 2 * kLanes);
                }
        for (; s < last; ++s)
            column_scales(m, part.at, (s - part.slice_begin) * kSlice, part.count, half + s * 2 * kLanes);
    }
}

// -8 .. 7 times a ratio, rounded to nearest even: the bytes that nibbles become.
inline void requantised_codes(float ratio, int8_t* codes) {
    constexpr float kRound = 12582912.0f;
    for (int32_t q = 0; q < 16; ++q)
        codes[q] =
            static_cast<int8_t>(float_bits(static_cast<float>(q - 8) * ratio + kRound) - float_bits(kRound));
}

// Integers of slices [begin, end) of one part into a panel that starts at slice `begin`. kFlip is xored into
// each byte. Columns and depths beyond the matrix are left as they are: such columns are given the scale 0,
// and the left operand is zero in such depths.
template <uint8_t kFlip, class T>
void decode_int8(const Part& part, const Ratios& ratios, int64_t begin, int64_t end, T* panel) {
    constexpr int64_t kPack = pack_of<T>();
    const auto value = [](uint8_t byte) {
        return static_cast<T>(static_cast<int8_t>(static_cast<uint8_t>(byte ^ kFlip)));
    };
    const Matrix& m = part.m;
    const bool int4 = m.format == Format::int4;
    if (int4 && !part.along_columns) return decode_nibbles(part, begin, end, panel);
    const int64_t depth = part.along_columns ? m.rows : m.cols;
    for (int64_t s = max_of(begin, part.slice_begin); s < min_of(end, part.slice_end); ++s) {
        T* slice = panel + panel_size<T>(s - begin) + part.half * kLanes * kPack;
        const int64_t first = (s - part.slice_begin) * kSlice, last = min_of(depth, first + kSlice);
        if (part.along_columns) {
            for (int64_t n = first; n < last; ++n) {
                const uint8_t* from = m.data + n * m.row_bytes + (int4 ? part.at / 2 : part.at);
                T* to = slice + (n - first) / kPack * step_size<T>() + (n - first) % kPack;
                if (int4) {
                    int8_t codes[16];
                    requantised_codes(ratios.of(part)[n], codes);
                    for (int64_t j = 0; j < part.count; ++j)
                        to[j * kPack] = value(static_cast<uint8_t>(codes[from[j / 2] >> (j % 2 * 4) & 15]));
                } else {
                    for (int64_t j = 0; j < part.count; ++j) to[j * kPack] = value(from[j]);
                }
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

// Whether a panel is one of nibbles.
inline bool has_nibbles(const Source& source) {
    return source.part[0].m.format == Format::int4 && !source.part[0].along_columns;
}

template <uint8_t kFlip, class T>
struct PlainInt8Ahead {
    Ratios ratios;
    Stretch wanted{};
    T* panel = nullptr;

    explicit PlainInt8Ahead(const Ratios& scratch) : ratios(scratch) {}

    void start(const Stretch& now, T* to, int64_t /*slices*/, const Stretch& /*then*/) {
        wanted = now;
        panel = to;
    }
    void step() {}
    void finish() {
        const Source* const source = wanted.source;
        if (source == nullptr) return;
        const int64_t begin = wanted.begin, end = wanted.end;
        ratios.prepare(*source, begin, end);
        for (int i = 0; i < source->parts; ++i)
            decode_int8<kFlip>(source->part[i], ratios, begin, end, panel);
        if (has_nibbles(*source))
            decode_group_scales(*source, begin, end,
                                reinterpret_cast<float*>(panel + panel_size<T>(end - begin)));
        wanted.source = nullptr;
    }
};

// The frozen products of ComputeInt8: in M, or in G where the left operand has groups. Tiles of M hold int32
// sums until complete().
template <class M, class G, class A>
struct Int8Products {
    using T = typename M::T;
    using Micro = M;
    static constexpr int kRaised = M::kRaised;
    using Ahead = A;

    static void run(Ahead& ahead, int count, const QuantisedLeft<T>& left, int64_t slices, const T* panel,
                    float* tile, bool accumulate, Touch touch) {
        for (int64_t i = 0; i < touch.count; ++i) __builtin_prefetch(touch.lines[i], 0, 2);
        if (left.in_groups)
            return G::run(count, left.data, left.rows, slices, panel,
                          reinterpret_cast<const float*>(panel + panel_size<T>(slices)), tile, accumulate,
                          ahead);
        M::run(count, left.data, slices / line_slices<T>(), panel, reinterpret_cast<int32_t*>(tile),
               accumulate, ahead);
    }

    // The sums times the scales of their rows and, where the panel's columns are channels, of these.
    static void complete(const Source& source, int count, const QuantisedLeft<T>& left, float* tile) {
        if (left.in_groups) return;
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
            for (int64_t j = 0; j < 2 * kLanes; ++j) {
                // Modulo 2^32: what raised elements added may have run over.
                const int32_t sum =
                    static_cast<int32_t>(static_cast<uint32_t>(sums[j]) + static_cast<uint32_t>(row.start));
                tile[j] = static_cast<float>(sum) * row.scale * columns[j];
            }
        }
    }
};

// A compute side whose frozen products are INT8.
template <class Base, class M, class G, class A>
struct ComputeInt8 : Base {
    using Frozen = Int8Products<M, G, A>;
};

// The part of a thread's scratch that only quantised products need.
template <class T, class Take, class Scratch>
void take_quantised(const Pass& p, int64_t max_slices, const Take& take, Scratch* s) {
    const int64_t widest = line_depth<T>(max_of(p.hidden_pad, p.parts * p.inter_pad));
    const int64_t slices = min_of(widest / kSlice, max_slices);
    const int64_t group_scales = p.in_groups ? slices * 2 * kLanes * 4 / static_cast<int64_t>(sizeof(T)) : 0;
    char* panel0 = take(panel_size<T>(slices) + group_scales, sizeof(T));
    char* panel1 = take(panel_size<T>(slices) + group_scales, sizeof(T));
    const int64_t depth = line_depth<T>(p.hidden_pad);
    char* packed = take(p.span_rows * depth, sizeof(T));
    char* rows = take(p.span_rows * (p.in_groups ? depth / kSlice : 1), sizeof(RowScale));
    char* row = take(widest, sizeof(float));
    char* channels = take(widest, sizeof(float));
    char* ratios = take(p.in_groups ? widest : 0, sizeof(float));
    if (s == nullptr) return;
    s->frozen_panel[0] = reinterpret_cast<T*>(panel0);
    s->frozen_panel[1] = reinterpret_cast<T*>(panel1);
    s->quantised = reinterpret_cast<T*>(packed);
    s->quantised_rows = reinterpret_cast<RowScale*>(rows);
    s->row = reinterpret_cast<float*>(row);
    s->channels = reinterpret_cast<float*>(channels);
    s->ratios = reinterpret_cast<float*>(ratios);
}

// Bytes of an element of a quantised left operand, 0 where there is none.
template <class C>
constexpr int64_t quantised_size() {
    return Quantised<C> ? static_cast<int64_t>(sizeof(typename Frozen<C>::T)) : 0;
}
