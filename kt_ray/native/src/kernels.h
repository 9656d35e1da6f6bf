// The contract between the engine (portable code) and one instruction set's kernels.
//
// Shapes: T tokens, K slots per token, E experts, H hidden, I intermediate, R rows = slots that name an
// expert, sorted by (expert, adapter, slot).
// "Storage type" S: float for float32 weights, bfloat16 for all other formats: what activations are
// kept and rounded in. "Compute type" C: what the micro-kernel of this instruction set multiplies;
// float widens bfloat16 exactly.
//
// Left operands of the micro-kernels are *packed*: the rows of one row block lie as
// [piece][row][line elements], a piece being one cache line of each row, padded with zeros. A packed
// buffer of depth D (elements, padded to whole lines) holds block b at offset b.begin * D. What has the rank
// of an adapter is packed so by segments.
#pragma once

#include <cstddef>
#include <cstdint>

#include "matrix.h"

namespace kt {

// Rows [begin, end) of one expert and one adapter (-1: none), in consecutive segments.
struct Group {
    int32_t expert, adapter;
    int64_t begin, end;
    int64_t segment_begin = 0, segment_end = 0;
};

// Rows of one expert that one run of the micro-kernel takes, whosever adapters they have.
struct RowBlock {
    int64_t begin;
    int32_t count, expert;
    int64_t segment_begin = 0, segment_end = 0;
};

// The rows of a block that belong to one group.
struct Segment {
    int64_t begin;
    int32_t count, group;
    int64_t block;
};

// Consecutive row blocks of one expert, few enough rows for a thread's scratch.
struct Span {
    int32_t expert;
    int64_t block_begin, block_end;
};

// Consecutive segments of one group: a task of the LoRA projections.
struct Chunk {
    int32_t group;
    int64_t segment_begin, segment_end;
};

// One adapter's matrices for every expert: a [E, rank, in], b [E, out, rank]. No gate_*: ungated.
struct LoraView {
    const float *gate_a, *gate_b, *up_a, *up_b, *down_a, *down_b;
    float scale;
    int64_t rank;
};

// Gradients are added; null pointers: this adapter wants none.
struct LoraGradView {
    float *gate_a, *gate_b, *up_a, *up_b, *down_a, *down_b;
};

enum Projection : int { kGate = 0, kUp = 1, kDown = 2 };

// docs/numerics.md gives the formulas.
enum class Activation : int32_t { silu, gelu_tanh, swiglu_oai, relu2 };

struct ActivationSpec {
    Activation kind = Activation::silu;
    float alpha = 1.702f;                      // swiglu_oai
    float gate_limit = 0.0f, up_limit = 0.0f;  // of silu and swiglu_oai; infinite: none
    bool gated() const { return kind != Activation::relu2; }
};

// A quantised row, or a group of one, is scale * its integers. Where panels are raised to be unsigned, its
// int32 sums start from `start`, modulo 2^32.
struct RowScale {
    float scale;
    int32_t start;
};

// Everything one call needs. Pointers are into the caller's tensors or the engine's buffers.
struct Pass {
    int64_t tokens, experts, hidden, inter, rows;
    int64_t parts;       // 2: gate and up; 1: up alone
    int64_t hidden_pad;  // of rows of x and dy, stored and packed: padded with zeros to whole slices
    int64_t inter_pad;   // depth of packed act; one part of packed gradients
    int64_t rank_pad;    // the largest rank, padded to a line of floats
    bool by_rows;        // forward without panels (generic/moe_rows.inl): row blocks have one row

    ExpertMatrices gate, up, down;  // [I, H], [I, H], [H, I] per expert; gate unused when parts is 1
    const float *gate_bias, *up_bias, *down_bias;  // [E, I], [E, I], [E, H] or null
    ActivationSpec activation;
    const LoraView* lora;
    const LoraGradView* lora_grads;

    const Group* groups;
    int64_t num_groups;
    const RowBlock* blocks;
    int64_t num_blocks;
    const Segment* segments;
    const Span* spans;
    int64_t num_spans;
    const Chunk* chunks;
    int64_t num_chunks;
    const int32_t* row_token;
    const float* row_weight;
    const uint32_t* row_hash;  // [3, R] by projection; null: no dropout
    uint32_t drop_below;       // an element whose hash is below is dropped
    float keep_scale;          // 1 / (1 - p)

    const void* x_in;  // caller's x [T, H], float or bfloat16
    bool x_in_bf16;
    void* x;          // [T, hidden_pad] S: kept for backward
    void* pair;       // [R, parts * inter_pad] S: gate, up; null: not kept
    void* pair_int8;  // [R, kept_row_bytes] of them; null: not kept so
    void* act;        // [R, inter_pad] C, packed
    float* lora_in;   // [R, 2 * rank_pad] packed: scale * A drop(x), gate then up
    float* lora_mid;  // [R, rank_pad] packed: scale * A_down drop(act)
    float* y;         // [T, H]

    const float* dy;  // [T, H]
    void* dy_stored;  // [T, hidden_pad] S
    void* dpair;      // [R, parts * inter_pad] C, packed: gradients of gate, up; weighted
    float* lora_out;  // [R, rank_pad] packed: scale * B_down^T dy, unweighted
    float* dlora_in;  // [R, 2 * rank_pad] packed: scale * B^T d(gate, up)
    float* dw_parts;  // [pieces(I, kDwColumns), R]
    float* dw_rows;   // [R]
    float* dx;        // [T, H]; null: not wanted

    // INT8 products only. Quantised and packed, rows padded to whole lines: act (null: not wanted), and the
    // gradients of gate and up times their channels' scales.
    void *act_int8, *dpair_int8;
    RowScale *act_scales, *dpair_scales;  // [R]; act's [R, groups] with in_groups, packed as its rows
    bool in_groups;                       // int4 weights: forward quantises x and act in groups of 32

    int64_t span_rows;    // at most, of a span
    int64_t inter_slab;   // columns of I per task: in backward a multiple of kDwColumns; no matter to results
    int64_t hidden_slab;  // columns of H per task of the scattering phases; does not affect results
    int64_t scatter_runs;  // and the runs that all spans are cut into there; does not affect results
};

// Steps of forward and backward: all tasks of one are done before the next begins.
enum class Phase : int32_t {
    store_x,   // task = kTokenChunk tokens: x -> S; y = 0
    lora_in,   // task = chunk: A_gate, A_up
    gate_up,   // task = (span, slab of I): gate, up, act
    shrink,    // task = chunk: gate, up to blocks of int8 and back; act from that
    lora_mid,  // task = chunk: A_down; INT8 products: act quantised
    down,      // task = (run of spans, slab of H): y
    store_dy,  // task = kTokenChunk tokens: dy -> S; dx = 0
    restore,   // task = chunk: gate, up from blocks of int8
    lora_out,  // task = chunk: B_down^T
    dact,      // task = (span, slab of I): gradients of gate, up; parts of dw
    dlora_in,  // task = chunk: B_gate^T, B_up^T; dw; INT8 products: gradients of gate, up quantised
    dx_grads,  // tasks = (run of spans, slab of H): dx; then (group, matrix, slab): gradients of the adapters
};

// A task of the scattering phases adds a run of spans to a slab of H, after all runs before it. They come run
// by run. Always inlined, as ExpertMatrices::at.
struct ScatterTask {
    int64_t slab, run;
};
[[gnu::always_inline]] inline int64_t scatter_slabs(const Pass& p) {
    return (p.hidden + p.hidden_slab - 1) / p.hidden_slab;
}
[[gnu::always_inline]] inline int64_t scatter_tasks(const Pass& p) {
    return scatter_slabs(p) * p.scatter_runs;
}
[[gnu::always_inline]] inline int64_t dx_tasks(const Pass& p) {
    return p.dx == nullptr ? 0 : scatter_tasks(p);
}
[[gnu::always_inline]] inline ScatterTask scatter_task(const Pass& p, int64_t task) {
    return {task % scatter_slabs(p), task / scatter_slabs(p)};
}
// The first span of a run: runs have about as many rows.
[[gnu::always_inline]] inline int64_t first_span(const Pass& p, int64_t run) {
    int64_t span = 0;
    while (span < p.num_spans && p.blocks[p.spans[span].block_begin].begin < p.rows * run / p.scatter_runs)
        ++span;
    return span;
}

constexpr int64_t kKeptBlock = 32;  // values of gate or up that share a scale; divides inter_pad
inline int64_t kept_row_bytes(const Pass& p) { return p.parts * p.inter_pad / kKeptBlock * (kKeptBlock + 2); }

constexpr int64_t kFewTokens = 16;  // by rows: tokens of a call, whatever the experts
constexpr int64_t kSpanRows = 16;   // by rows: of a span or a chunk, at most
constexpr int64_t kTokenChunk = 64;
constexpr int64_t kChunkRows = 128;  // at most, of a chunk
constexpr int64_t kDwColumns = 128;  // columns of I whose part of dw is summed in one piece
constexpr int64_t kGradSlab = 512;   // columns per task of the adapter gradients
constexpr int kGradMatrices = 6;
constexpr int64_t kMaxRank = 256;  // of an adapter

// The kernels of one instruction set for one storage type.
struct Kernels {
    bool compute_is_bf16;
    int64_t max_rows;  // of a row block
    int64_t row_step;  // row blocks are multiples of this but for the last of an expert
    int64_t panel_columns;
    bool blocks_depth;       // the rows of a span need not fit the L2 cache: only a block of their depth
    int64_t quantised_size;  // INT8 products: bytes of an element of a quantised left operand; else 0
    int64_t (*tasks)(const Pass&, Phase);
    size_t (*scratch_bytes)(const Pass&, Phase);  // per thread
    void (*run)(const Pass&, Phase, int64_t task, void* scratch);
    // The expert (local number) a task works for, -1 when it works for several.
    int32_t (*expert_of)(const Pass&, Phase, int64_t task);
    // FLOP of `runs` products of operands that lie in the L1 cache, done by the calling thread.
    int64_t (*products)(int64_t runs);
};

// int8: for int4 and per-channel int8 weights, multiplied as integers with quantised activations.
namespace reference {
extern const Kernels f32, bf16, int8;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Kernels f32, bf16, int8;
}
namespace avx512 {
extern const Kernels f32, bf16, int8;
}
namespace avx512_vnni {
extern const Kernels int8;
}
namespace avx512_bf16 {
extern const Kernels bf16;
}
namespace amx {
extern const Kernels bf16, int8;
}
#endif

}  // namespace kt
