// Decoding the next panel ahead: the micro-kernel's instruction set may do it bit by bit inside the
// products (isa/avx512_ahead.inl); this one does it at once.

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

    // What a thread does before and after a task's products.
    static void enter() {}
    static void leave() {}

    static void run(Ahead&, int count, const float* left, int64_t slices, const float* panel, float* tile,
                    bool accumulate) {
        MicroF32::run(count, left, slices * kSlice, panel, tile, accumulate);
    }
};
