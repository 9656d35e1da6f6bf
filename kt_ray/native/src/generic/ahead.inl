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
    Stretch wanted{};
    T* panel = nullptr;

    // A stretch is wanted in `panel`, during `slices` slices of products; `then` is wanted next.
    void start(const Stretch& now, T* to, int64_t /*slices*/, const Stretch& /*then*/) {
        wanted = now;
        panel = to;
    }
    void finish() {
        if (wanted.source != nullptr) decode<T>(*wanted.source, wanted.begin, wanted.end, panel);
        wanted.source = nullptr;
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
