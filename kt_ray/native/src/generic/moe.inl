// One expert layer, forward and backward, with LoRA: the algorithm, written once. S is the storage type
// of activations, C the compute side of the instruction set (its type, micro-kernel and decoder of the
// next panel); the rank-sized expansions of LoRA and the adapters' gradients always run in float32.
//
// Bit-identical for any number of threads: a task owns its outputs, sums run in an order fixed by the
// shapes and the routing alone, and scattering tasks own column slabs of all tokens, one run of experts after
// the other (turns.h).

constexpr int64_t kColumns = 2 * kLanes;        // of a panel
constexpr int64_t kRankLine = MicroF32::kLine;  // ranks in a line of the packed LoRA intermediates
constexpr int64_t kGradRows = 512;              // rows per pass of the adapters' gradients
constexpr int64_t kTouchLines = 8;              // cache lines per row that the end of a tile touches
constexpr int64_t kGradRanks = 8;               // ranks per run of their kernel

template <class C>
constexpr int64_t slice_steps() {
    return kSlice / pack_of<typename C::T>();
}

// A panel's depth is cut into blocks so that two of them stay in the cache that the micro-kernel reads them
// from.
template <class C>
constexpr int64_t max_slices(bool along_columns = false) {
    int64_t bytes = C::Micro::kPanelBytes;
    if constexpr (requires { C::Micro::kColumnPanelBytes; })
        if (along_columns) bytes = C::Micro::kColumnPanelBytes;
    return bytes /
           (slice_steps<C>() * step_size<typename C::T>() * static_cast<int64_t>(sizeof(typename C::T)));
}
// How many panels a block of depth goes through before the next one.
template <class Micro>
constexpr int64_t sum_panels(bool along_columns) {
    if constexpr (requires { Micro::kColumnSumPanels; })
        return along_columns ? Micro::kColumnSumPanels : Micro::kSumPanels;
    else
        return Micro::kSumPanels;
}
template <class Micro>
constexpr int64_t kMostSumPanels = sum_panels<Micro>(true) > sum_panels<Micro>(false)
                                       ? sum_panels<Micro>(true)
                                       : sum_panels<Micro>(false);
// How many panels are decoded side by side: along columns several of a group, where an instruction set can.
template <class C>
constexpr int64_t panels_ahead(bool along_columns) {
    if constexpr (requires { C::Ahead::kPanels; })
        return along_columns ? C::Ahead::kPanels : 1;
    else
        return 1;
}

// Whether calls by rows take these kernels, not another instruction set's.
template <class C>
constexpr bool kByRows = !Quantised<C> && !std::is_void_v<typename C::Rows>;

// Where kColumns columns of a row lie: two vectors, and how far the next columns are.
struct WideRow {
    const char* at;
    int64_t second, step;  // bytes to the second vector, to the next kColumns columns
};

// Scratch of one thread, carved from one allocation.
template <class C>
struct Scratch {
    using T = typename C::T;
    T* panel[2];                  // decoded weights: in use, and the next; each may be several panels
    T* packed;                    // left operand of a span or chunk
    T* ordered;                   // rows of a span in the order of a format
    float* tiles;                 // [sum_panels][rows of a span][kColumns]
    float* masked;                // [rows of a block][kColumns]
    float* lora_panel;            // [2 * rank_pad][kColumns]
    float* sums;                  // [panels of the projections][kChunkRows][kColumns]
    float* split;                 // [2][kSlice * rank_pad + a vector]
    float* left;                  // [kGradRows][kGradRanks]
    float* right;                 // [kGradRows][kColumns]
    WideRow *wide, *masked_wide;  // [kGradRows]
    const char** lines;           // [kTouchLines * rows of a block]

    typename Frozen<C>::T* frozen_panel[2];  // the panels, or those of quantised products
    typename Frozen<C>::T* quantised;        // with these only: left operand of a span,
    RowScale* quantised_rows;                // its rows' scales,
    float* row;                              // a row to be quantised,
    float* channels;                         // the scales along it,
    float* ratios;                           // and those of a panel to be requantised
};

template <class C>
size_t carve(const Pass& p, char* base, Scratch<C>* s) {
    using T = typename C::T;
    size_t used = 0;
    const auto take = [&](int64_t count, size_t element) {
        char* here = base + used;
        used += (static_cast<size_t>(count) * element + 127) / 128 * 128;
        return here;
    };
    const int64_t depth = max_of(p.hidden_pad, p.parts * p.inter_pad) / kSlice;
    const int64_t panel = p.by_rows ? 0 : min_of(depth, max_slices<C>()) * slice_steps<C>() * step_size<T>();
    const int64_t few = min_of(p.rows, kSpanRows);  // of a span or a chunk by rows
    const int64_t rows = p.by_rows ? few : max_of(p.span_rows, kChunkRows);
    const int64_t rank = max_of(p.rank_pad, kRankLine);
    char* panel0 = take(panels_ahead<Frozen<C>>(true) * panel, sizeof(T));
    char* panel1 = take(panels_ahead<Frozen<C>>(true) * panel, sizeof(T));
    char* packed = take(rows * max_of(p.hidden_pad, p.inter_pad), sizeof(T));
    int64_t ordered_size = 0;
    if constexpr (kByRows<C>)
        if (p.by_rows) ordered_size = C::Rows::ordered_size(max_of(p.hidden_pad, p.inter_pad));
    char* ordered = take(few * ordered_size, sizeof(T));
    char* tiles = take((p.by_rows ? 1 : kMostSumPanels<typename C::Micro>)*rows * kColumns, sizeof(float));
    char* masked = take(C::Micro::kMaxRows * kColumns, sizeof(float));
    char* lora_panel = take(2 * rank * kColumns, sizeof(float));
    char* sums = take(pieces(4 * rank, kColumns) * kChunkRows * kColumns, sizeof(float));
    char* split = take(2 * kSlice * rank + kLanes, sizeof(float));
    char* left = take(kGradRows * kGradRanks, sizeof(float));
    char* right = take(kGradRows * kColumns, sizeof(float));
    char* wide = take(kGradRows, sizeof(WideRow));
    char* masked_wide = take(kGradRows, sizeof(WideRow));
    char* lines = take(C::Micro::kMaxRows * kTouchLines, sizeof(void*));
    if constexpr (Quantised<C>) take_quantised<typename Frozen<C>::T>(p, max_slices<Frozen<C>>(), take, s);
    if (s != nullptr) {
        s->panel[0] = reinterpret_cast<T*>(panel0);
        s->panel[1] = reinterpret_cast<T*>(panel1);
        s->packed = reinterpret_cast<T*>(packed);
        s->ordered = reinterpret_cast<T*>(ordered);
        s->tiles = reinterpret_cast<float*>(tiles);
        s->masked = reinterpret_cast<float*>(masked);
        s->lora_panel = reinterpret_cast<float*>(lora_panel);
        s->sums = reinterpret_cast<float*>(sums);
        s->split = reinterpret_cast<float*>(split);
        s->left = reinterpret_cast<float*>(left);
        s->right = reinterpret_cast<float*>(right);
        s->wide = reinterpret_cast<WideRow*>(wide);
        s->masked_wide = reinterpret_cast<WideRow*>(masked_wide);
        s->lines = reinterpret_cast<const char**>(lines);
        if constexpr (!Quantised<C>) {
            s->frozen_panel[0] = s->panel[0];
            s->frozen_panel[1] = s->panel[1];
        }
    }
    return used;
}

template <class S, class C>
struct Moe {
    using T = typename C::T;
    static constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(T));

    const Pass& p;
    Scratch<C> s;

    const S* x_row(int64_t token) const { return static_cast<const S*>(p.x) + token * p.hidden_pad; }
    const S* dy_row(int64_t token) const { return static_cast<const S*>(p.dy_stored) + token * p.hidden_pad; }
    S* pair(const RowBlock& b) const { return static_cast<S*>(p.pair) + b.begin * p.parts * p.inter_pad; }
    T* act(const RowBlock& b) const { return static_cast<T*>(p.act) + b.begin * p.inter_pad; }
    T* dpair(const RowBlock& b) const { return static_cast<T*>(p.dpair) + b.begin * p.parts * p.inter_pad; }
    float* lora_in(const Segment& g) const { return p.lora_in + g.begin * 2 * p.rank_pad; }
    float* dlora_in(const Segment& g) const { return p.dlora_in + g.begin * 2 * p.rank_pad; }
    float* lora_mid(const Segment& g) const { return p.lora_mid + g.begin * p.rank_pad; }
    float* lora_out(const Segment& g) const { return p.lora_out + g.begin * p.rank_pad; }

    // Element `column` of row i of a packed block or segment that starts at `base`.
    template <class Element, class Rows>
    static Element* packed_at(Element* base, const Rows& b, int64_t i, int64_t column) {
        constexpr int64_t kElements = 64 / static_cast<int64_t>(sizeof(Element));
        return base + (column / kElements * b.count + i) * kElements + column % kElements;
    }
    // The same column of the next row is this many elements on.
    template <class Element>
    static constexpr int64_t kNextRow = 64 / static_cast<int64_t>(sizeof(Element));

    // Stores the value in storage type. A bfloat16 store rounds by itself, in the same way.
    static void store_rounded(T* to, Vec v) {
        if constexpr (sizeof(T) == sizeof(S))
            vstore(to, v);
        else
            vstore(to, vthrough<S>(v));
    }
    const LoraView* lora_of(int32_t group) const {
        const int32_t adapter = p.groups[group].adapter;
        return adapter < 0 ? nullptr : p.lora + adapter;
    }
    // body(segment, lora) for those of a block that have an adapter.
    template <class Body>
    void each_adapter(const RowBlock& b, const Body& body) const {
        for (int64_t i = b.segment_begin; i < b.segment_end; ++i)
            if (const LoraView* lora = lora_of(p.segments[i].group)) body(p.segments[i], *lora);
    }
    const RowBlock& block_of(const Segment& g) const { return p.blocks[g.block]; }
    static int64_t rank_lines(const LoraView& lora) { return pieces(lora.rank, kRankLine); }

    void drop(float* v, int64_t n, int64_t first, int64_t row, Projection projection) const {
        apply_dropout(v, n, first, p.row_hash[projection * p.rows + row], p.drop_below, p.keep_scale);
    }

    // Packs `depth` elements (whole lines) of the rows of a block or segment; from(i) gives row i.
    template <class Rows, class From>
    static void pack(const Rows& b, int64_t depth, const From& from, T* to) {
        for (int64_t i = 0; i < b.count; ++i) {
            const S* row = from(i);
            T* line = to + i * kLine;
            for (int64_t k = 0; k < depth; k += kLine, line += b.count * kLine) pack_line(row + k, line);
        }
    }
    static void pack_line(const S* from, T* line) {
        if constexpr (sizeof(S) == sizeof(T))
            memcpy(line, from, kLine * sizeof(T));
        else
            widen(from, kLine, line);
    }

    // Products of packed rows with a sequence of panels, each decoded while the one before is used. Depth
    // goes block by block through groups of panels, whose sums are kept meanwhile.
    //
    // source_of(j): the panel of item j; blocks_of(j): its row blocks [first, last); left_of(block): their
    // packed rows, `slices` deep; before(j, block, touch) names the lines that finish will need;
    // finish(j, block, tile) gets the complete products.
    template <class SourceOf, class BlocksOf, class LeftOf, class Before, class Finish>
    void sweep(int64_t items, int64_t slices, const SourceOf& source_of, const BlocksOf& blocks_of,
               const LeftOf& left_of, const Before& before, const Finish& finish) const {
        if (items == 0) return;
        if constexpr (kByRows<C>)
            if (p.by_rows) return sweep_rows(items, slices, source_of, blocks_of, left_of, finish);
        using F = Frozen<C>;
        constexpr int64_t kWhole = line_slices<typename F::T>();
        constexpr int64_t kSources = 2 * kMostSumPanels<typename F::Micro> + 1;  // two groups', and the next
        const bool along_columns = source_of(0).part[0].along_columns;
        const int64_t in_group = sum_panels<typename F::Micro>(along_columns),
                      in_step = panels_ahead<F>(along_columns);
        const int64_t lines = pieces(slices, kWhole),
                      cuts = pieces(lines * kWhole, max_slices<F>(along_columns));
        const auto cut = [&](int64_t d) { return lines * d / cuts * kWhole; };
        struct Step {  // items [item, end) of a group, in one block of depth
            int64_t item, end, cut;
        };
        const auto group_of = [&](int64_t item) { return item / in_group * in_group; };
        const auto from = [&](int64_t item, int64_t d) {
            return Step{item, min_of(items, min_of(group_of(item) + in_group, item + in_step)), d};
        };
        const auto after = [&](const Step& step) {
            const int64_t group = group_of(step.item);
            if (step.end < min_of(items, group + in_group)) return from(step.end, step.cut);
            return step.cut + 1 < cuts ? from(group, step.cut + 1) : from(step.end, 0);
        };
        Source sources[kSources];  // of item j at j % kSources
        int64_t known = 0;
        const auto know = [&](const Step& step) {
            for (const int64_t end = min_of(items, group_of(step.item) + kSources); known < end; ++known)
                sources[known % kSources] = source_of(known);
        };
        const auto stretch = [&](int64_t item, int64_t d) {
            return Stretch{&sources[min_of(item, items - 1) % kSources], cut(d), cut(d + 1)};
        };
        // Asks for the panels of a step, in one of the buffers, during so many slices of products.
        auto ahead = decoder();
        const auto decode_ahead = [&](const Step& step, int buffer, int64_t during) {
            const Step then = after(step);
            if constexpr (requires { F::Ahead::kPanels; }) {
                Stretch wanted[panels_ahead<F>(true)];
                for (int64_t j = step.item; j < step.end; ++j) wanted[j - step.item] = stretch(j, step.cut);
                ahead.start(wanted, step.end - step.item, s.frozen_panel[buffer], during,
                            stretch(then.item, then.cut));
            } else {
                ahead.start(stretch(step.item, step.cut), s.frozen_panel[buffer], during,
                            stretch(then.item, then.cut));
            }
        };
        Step now = from(0, 0);
        know(now);
        decode_ahead(now, 0, 0);
        ahead.finish();
        for (int buffer = 0; now.item < items; buffer ^= 1) {
            know(now);
            const Step next = after(now);
            const int64_t begin = cut(now.cut), slices_now = cut(now.cut + 1) - begin;
            const bool last = now.cut + 1 == cuts;
            if (next.item < items) {
                int64_t blocks = 0;
                for (int64_t j = now.item; j < now.end; ++j) blocks += blocks_of(j).last - blocks_of(j).first;
                decode_ahead(next, buffer ^ 1, slices_now * blocks);
            }
            for (int64_t j = now.item; j < now.end; ++j) {
                const BlockRange range = blocks_of(j);
                const auto* panel = s.frozen_panel[buffer] + (j - now.item) * slices_now * slice_steps<F>() *
                                                                 step_size<typename F::T>();
                const int64_t first_sum = (j - group_of(j)) * p.span_rows - p.blocks[range.first].begin;
                for (int64_t q = range.first; q < range.last; ++q) {
                    const RowBlock& b = p.blocks[q];
                    Touch touch{s.lines};
                    if (last) before(j, b, touch);
                    float* tile = cuts == 1 ? s.tiles : s.tiles + (first_sum + b.begin) * kColumns;
                    const auto left = left_of(b);
                    F::run(ahead, b.count, left + begin * kSlice * b.count, slices_now, panel, tile,
                           now.cut > 0, touch);
                    if constexpr (Quantised<C>)
                        if (last) F::complete(*stretch(j, now.cut).source, b.count, left, tile);
                    if (last) finish(j, b, tile);
                }
            }
            ahead.finish();
            now = next;
        }
    }

    // Called for each row of a tile's end: every eighth gives a tile unit a product.
    static void keep_awake(int64_t row) {
        if constexpr (!Quantised<C> && requires { C::Micro::keep_awake(); })
            if (row % 8 == 0) C::Micro::keep_awake();
    }

    auto decoder() const {
        if constexpr (kQuantised)
            return typename Frozen<C>::Ahead(Ratios(s.channels, s.ratios));
        else
            return typename Frozen<C>::Ahead();
    }

    struct BlockRange {
        int64_t first, last;
    };
    BlockRange blocks_of(const Span& span) const { return {span.block_begin, span.block_end}; }

#include "generic/moe_int8.inl"
#include "generic/moe_forward.inl"
#include "generic/moe_backward.inl"
#include "generic/moe_blocks.inl"
#include "generic/moe_lora.inl"
#include "generic/moe_rows.inl"
#include "generic/moe_grads.inl"
};

#include "generic/table.inl"
