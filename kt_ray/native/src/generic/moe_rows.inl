// Members of Moe: calls of few tokens (Pass::by_rows), row by row of the weights. Included inside the class.
//
// A panel costs as much for one row of x as for ten. Here the lanes go along the contraction instead: a
// stored row times every row of x, and nothing is written but the sums. Row blocks have one row each, so that
// packed rows are rows as they are, and the ends of tiles are those of the panels' products.

// What sweep() does. `left_of` gives rows in natural order, those of a range one after another.
template <class SourceOf, class BlocksOf, class LeftOf, class Finish>
void sweep_rows(int64_t items, int64_t slices, const SourceOf& source_of, const BlocksOf& blocks_of,
                const LeftOf& left_of, const Finish& finish) const {
    using Rows = typename C::Rows;
    const int64_t depth = slices * kSlice, ordered_depth = Rows::ordered_size(depth);
    int64_t ordered = -1;  // first block of the range that is in s.ordered
    Source now = source_of(0);
    for (int64_t j = 0; j < items; ++j) {
        const Source next = j + 1 < items ? source_of(j + 1) : Source{};
        const BlockRange range = blocks_of(j);
        const int64_t tokens = range.last - range.first;
        const Matrix &first = now.part[0].m, &last = now.part[now.parts - 1].m;
        const bool fast = first.format == last.format && Rows::fast(first) && Rows::fast(last);
        const T* x = left_of(p.blocks[range.first]);
        if (fast && ordered != range.first) {
            for (int64_t i = 0; i < tokens; ++i)
                Rows::order(first, x + i * depth, s.ordered + i * ordered_depth);
            ordered = range.first;
        }
        memset(s.tiles, 0, tokens * kColumns * sizeof(float));
        for (int i = 0; i < now.parts; ++i) {
            const Part &part = now.part[i], &after = next.part[i];
            const RowRange rows = {part.at, part.count, j == 0, after.m.data + after.at * after.m.row_bytes,
                                   i < next.parts ? after.count : 0};
            Rows::dots(part.m, fast, rows, fast ? s.ordered : x, fast ? ordered_depth : depth, tokens,
                       s.tiles + part.half * kLanes);
        }
        for (int64_t q = range.first; q < range.last; ++q)
            finish(j, p.blocks[q], s.tiles + (q - range.first) * kColumns);
        now = next;
    }
}

// What project() does with the A of an adapter: products in float32.
template <class LeftOf, class Out>
void project_rows(const Chunk& chunk, const Projected& w, float scale, const LeftOf& left_of,
                  const Out& out) const {
    for (int64_t q = chunk.segment_begin; q < chunk.segment_end; ++q) {
        const Segment& g = p.segments[q];
        const T* x = left_of(g);
        for (int64_t m = 0; m < w.count; ++m) {
            float* to = out(g, m);
            for (int64_t r = w.rank; r < padded_rank(w.rank); ++r) to[r] = 0.0f;
            for (int64_t r = 0; r < w.rank; ++r)
                to[r] = scale * adapter_dot(w.matrix[m] + r * w.depth, x, w.depth);
        }
    }
}

static int64_t padded_rank(int64_t rank) { return pieces(rank, kRankLine) * kRankLine; }

static float adapter_dot(const float* a, const T* x, int64_t depth) {
    Vec sum[4] = {vset1(0.0f), vset1(0.0f), vset1(0.0f), vset1(0.0f)};
    int64_t k = 0;
    for (; k + 4 * kLanes <= depth; k += 4 * kLanes)
        for (int64_t i = 0; i < 4; ++i)
            sum[i] = vfma(vload(a + k + i * kLanes), vload(x + k + i * kLanes), sum[i]);
    float rest = 0.0f;
    for (; k < depth; ++k) rest += a[k] * to_float(x[k]);
    return vsum((sum[0] + sum[1]) + (sum[2] + sum[3])) + rest;
}
