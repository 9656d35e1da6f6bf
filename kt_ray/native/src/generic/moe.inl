// One expert layer, forward and backward, with LoRA: the algorithm, written once. S is the storage type
// of the weights, M the micro-kernel of their compute type; LoRA always runs on MicroF32.
//
// Bit-identical for any number of threads: a task owns its outputs, sums run in an order fixed by the
// shapes and the routing alone, and scattering tasks own column slabs of all tokens.

constexpr int64_t kColumns = 2 * kLanes;  // of a panel
constexpr int64_t kDepthBlock = 1024;     // contraction per pass of the LoRA projections
constexpr int64_t kRowBlock = 512;        // rows per pass of the adapter gradients

// Smallest panel-aligned scratch of one thread, carved from one allocation.
template <class M>
struct Scratch {
    typename M::T* panel;  // [max(hidden, 2 * inter_even)] deep
    float* lora_panel;     // [max(2 * rank, kDepthBlock)] deep
    float* inputs;         // [kMaxChunkRows, kDepthBlock]
    float* sums;           // [panels of rank, kMaxChunkRows, kColumns]
    float* left;           // [rank, kRowBlock]
    float* tile;           // [kMaxRows, kColumns]
    float* tile2;
};

template <class M>
size_t carve(const Pass& p, char* base, Scratch<M>* s) {
    size_t used = 0;
    const auto take = [&](int64_t count, size_t element) {
        char* here = base + used;
        used += (static_cast<size_t>(count) * element + 63) / 64 * 64;
        return here;
    };
    const int64_t even = (p.hidden + 1) / 2 * 2;
    const int64_t depth = max_of(even, 2 * p.inter_even);
    const int64_t rank = max_of(p.rank_stride, 1);
    char* panel = take(depth * kColumns, sizeof(typename M::T));
    char* lora_panel = take(max_of(2 * rank, kDepthBlock) * kColumns, sizeof(float));
    char* inputs = take(kMaxChunkRows * kDepthBlock, sizeof(float));
    char* sums = take(pieces(rank, kColumns) * kMaxChunkRows * kColumns, sizeof(float));
    char* left = take(rank * kRowBlock, sizeof(float));
    char* tile = take(kMaxRows * kColumns, sizeof(float));
    char* tile2 = take(kMaxRows * kColumns, sizeof(float));
    if (s != nullptr) {
        s->panel = reinterpret_cast<typename M::T*>(panel);
        s->lora_panel = reinterpret_cast<float*>(lora_panel);
        s->inputs = reinterpret_cast<float*>(inputs);
        s->sums = reinterpret_cast<float*>(sums);
        s->left = reinterpret_cast<float*>(left);
        s->tile = reinterpret_cast<float*>(tile);
        s->tile2 = reinterpret_cast<float*>(tile2);
    }
    return used;
}

// Calls body(first row, count) over even blocks of at most kMaxRows.
template <class Body>
void row_blocks(int64_t begin, int64_t end, const Body& body) {
    const int64_t rows = end - begin, blocks = pieces(rows, kMaxRows);
    for (int64_t b = 0; b < blocks; ++b) {
        const int64_t first = begin + rows * b / blocks;
        body(first, static_cast<int>(begin + rows * (b + 1) / blocks - first));
    }
}

template <class S, class M>
struct Moe {
    using T = typename M::T;

    const Pass& p;
    Scratch<M> s;

    const S* matrix(const void* base, int64_t expert) const {
        return static_cast<const S*>(base) + expert * p.inter * p.hidden;
    }
    const T* x_row(int64_t token) const {
        return static_cast<const T*>(p.x_compute) + token * p.hidden_stride;
    }
    const T* dy_row(int64_t token) const {
        return static_cast<const T*>(p.dy_compute) + token * p.hidden_stride;
    }
    T* act_row(int64_t row) const { return static_cast<T*>(p.act) + row * p.inter_stride; }
    S* pair_row(int64_t row) const { return static_cast<S*>(p.pair) + row * p.pair_stride; }
    T* dpair_row(int64_t row) const { return static_cast<T*>(p.dpair) + row * p.pair_stride; }
    float* lora_in_row(int64_t row) const { return p.lora_in + row * 2 * p.rank_stride; }
    float* dlora_in_row(int64_t row) const { return p.dlora_in + row * 2 * p.rank_stride; }
    float* lora_mid_row(int64_t row) const { return p.lora_mid + row * p.rank_stride; }
    float* lora_out_row(int64_t row) const { return p.lora_out + row * p.rank_stride; }

    void drop(float* v, int64_t n, int64_t first, int64_t row, Projection projection) const {
        if (p.row_hash != nullptr)
            apply_dropout(v, n, first, p.row_hash[projection * p.rows + row], p.drop_below, p.keep_scale);
    }

    // tile (+)= rows(i)[0..steps) times the panel; `rows(i)` gives row i's first element.
    template <class Kernel, class Rows>
    static void multiply(int count, const Rows& rows, int64_t steps, const typename Kernel::T* panel,
                         float* tile, bool accumulate, Prefetch* next = nullptr) {
        const typename Kernel::T* pointers[kMaxRows];
        for (int i = 0; i < count; ++i) pointers[i] = rows(i);
        Prefetch nothing;
        Kernel::run(count, pointers, steps, panel, tile, accumulate,
                    (next != nullptr ? next : &nothing)->take(steps));
    }

#include "generic/moe_forward.inl"
#include "generic/moe_backward.inl"
#include "generic/moe_lora.inl"
};

#include "generic/table.inl"
