// Cache lines that the end of a row block's products will need: asked for one at a time during the
// products, where the micro-kernel can.
struct Touch {
    const char** lines;
    int64_t count = 0;

    void add(const void* line) { lines[count++] = static_cast<const char*>(line); }
};

// Decoding the next panel ahead: an instruction set may do it bit by bit inside the products
// (generic/pieces.inl, isa/avx512_ahead.inl); this one does it at once.

template <class T>
struct PlainAhead {
    const Source* source = nullptr;
    int64_t begin = 0, end = 0;
    T* panel = nullptr;

    // Slices [begin, end) of `source` are wanted in `panel`, during `slices` slices of products.
    void start(const Source& from, int64_t first, int64_t last, T* to, int64_t /*slices*/,
               const Source& /*after*/) {
        source = &from;
        begin = first;
        end = last;
        panel = to;
    }
    void finish() {
        if (source != nullptr) decode<T>(*source, begin, end, panel);
        source = nullptr;
    }
};

struct ComputeF32 {
    using T = float;
    using Micro = MicroF32;
    using Ahead = PlainAhead<float>;
    using Rows = RowsF32;

    // What a thread does before and after a task's products.
    static void enter() {}
    static void leave() {}

    static void run(Ahead&, int count, const float* left, int64_t slices, const float* panel, float* tile,
                    bool accumulate, Touch touch) {
        for (int64_t i = 0; i < touch.count; ++i) __builtin_prefetch(touch.lines[i], 0, 2);
        MicroF32::run(count, left, slices * kSlice, panel, tile, accumulate);
    }
};
