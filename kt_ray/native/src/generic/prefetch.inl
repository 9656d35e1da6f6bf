// The raw cache lines of the next panel, fetched to L2 one per step of the micro-kernel: spread out,
// they hide behind the arithmetic; in the decoder they would be waited for.
struct Prefetch {
    static constexpr int kStreams = 4;
    struct Stream {
        const char* at;
        int64_t stride, lines;
    };
    Stream streams[kStreams];
    int count = 0;

    // Lines of a block of a matrix: whole rows, or a column of `bytes` per row.
    template <class S>
    void add_rows(const S* w, int64_t rows, int64_t ld) {
        add(w, kLine, (rows * ld * static_cast<int64_t>(sizeof(S))) / kLine);
    }
    template <class S>
    void add_columns(const S* w, int64_t columns, int64_t rows, int64_t ld) {
        const int64_t bytes = columns * static_cast<int64_t>(sizeof(S));
        for (int64_t b = 0; b < bytes; b += kLine)
            add(reinterpret_cast<const char*>(w) + b, ld * static_cast<int64_t>(sizeof(S)), rows);
    }
    void add(const void* at, int64_t stride, int64_t lines) {
        if (count < kStreams && lines > 0) streams[count++] = {static_cast<const char*>(at), stride, lines};
    }

    // The piece for one run of the micro-kernel over `steps`; stride 0 when nothing is left.
    Stream take(int64_t steps) {
        if (count == 0) return {reinterpret_cast<const char*>(this), 0, 0};
        Stream& first = streams[0];
        const Stream piece = {first.at, first.stride, min_of(steps, first.lines)};
        first.at += piece.lines * first.stride;
        first.lines -= piece.lines;
        if (first.lines == 0) {
            --count;
            for (int i = 0; i < count; ++i) streams[i] = streams[i + 1];
        }
        return piece;
    }
};
