// The contract between the engine (portable code) and one instruction set's kernels.
//
// Shapes: T tokens, K slots per token, E experts, H hidden, I intermediate, R rows = slots that name
// an expert, sorted by (expert, adapter, slot). Strides are in elements of the buffer's own type.
// "Storage type" S: float or bfloat16, that of the weights. "Compute type" C: what the micro-kernel
// of this instruction set multiplies; float widens bfloat16 storage exactly.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kt {

enum class Format : int32_t { f32, bf16 };

// Rows [begin, end) of one expert and one adapter (-1: none).
struct Group {
    int32_t expert, adapter;
    int64_t begin, end;
};

// Groups [group_begin, group_end) of one expert, covering rows [begin, end).
struct ExpertRows {
    int32_t expert;
    int64_t begin, end;
    int64_t group_begin, group_end;
};

// A piece of a group small enough for one task.
struct Chunk {
    int32_t group;
    int64_t begin, end;
};

// One adapter's matrices for every expert: a [E, rank, in], b [E, out, rank].
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

// Everything one call needs. Pointers are into the caller's tensors or the engine's buffers.
struct Pass {
    int64_t tokens, experts, hidden, inter, rows;
    int64_t hidden_stride;  // of x, dy in compute/storage buffers: even, padded with zeros
    int64_t inter_even;     // inter rounded up to even: where `up` starts in a gate|up row
    int64_t inter_stride;   // of act
    int64_t pair_stride;    // of gate|up and their gradients
    int64_t rank_stride;    // of LoRA intermediates (the largest rank)

    const void *gate, *up, *down;  // [E, I, H], [E, I, H], [E, H, I] in S
    const LoraView* lora;
    const LoraGradView* lora_grads;

    const ExpertRows* expert_rows;
    int64_t num_expert_rows;
    const Group* groups;
    int64_t num_groups;
    const Chunk* chunks;
    int64_t num_chunks;
    const int32_t* row_token;
    const float* row_weight;
    const uint32_t* row_hash;  // [3, R] by projection; null: no dropout
    uint32_t drop_below;       // an element whose hash is below is dropped
    float keep_scale;          // 1 / (1 - p)

    const void* x_in;  // caller's x [T, H], float or bfloat16
    bool x_in_bf16;
    void* x;          // [T, hidden_stride] S: kept for backward
    void* x_compute;  // [T, hidden_stride] C: the same buffer as x when C is S
    void* pair;       // [R, pair_stride] S: gate|up; null: not kept
    void* act;        // [R, inter_stride] C
    float* lora_in;   // [R, 2 * rank_stride]: scale * A drop(x), gate then up
    float* lora_mid;  // [R, rank_stride]: scale * A_down drop(act)
    float* y;         // [T, H]

    const float* dy;   // [T, H]
    void* dy_compute;  // [T, hidden_stride] C
    void* dpair;       // [R, pair_stride] C: gradients of gate|up, weighted
    float* lora_out;   // [R, rank_stride]: scale * B_down^T dy, unweighted
    float* dlora_in;   // [R, 2 * rank_stride]: scale * B^T d(gate|up)
    float* dw_parts;   // [slabs, R]
    float* dw_rows;    // [R]
    float* dx;         // [T, H]

    int64_t slab_columns;  // columns of H per task of the scattering phases; does not affect results
};

// Steps of forward and backward: all tasks of one are done before the next begins.
enum class Phase : int32_t {
    convert_x,   // task = kTokenChunk tokens: x -> storage and compute type
    widen_x,     // task = kTokenChunk tokens: kept x -> compute type
    lora_in,     // task = chunk: A_gate, A_up
    gate_up,     // task = (expert, slab of I): gate, up, act
    lora_mid,    // task = chunk: A_down
    down,        // task = slab of H: y
    convert_dy,  // task = kTokenChunk tokens
    lora_out,    // task = chunk: B_down^T
    dact,        // task = (expert, slab of I): gradients of gate, up; parts of dw
    dlora_in,    // task = chunk: B_gate^T, B_up^T; dw
    dx_grads,    // tasks = slabs of H: dx; then (group, matrix, slab): gradients of the adapters
};

constexpr int64_t kTokenChunk = 64;
constexpr int64_t kMaxChunkRows = 48;  // rows of one task of the LoRA phases
constexpr int64_t kSlab = 128;         // columns of I per task: a multiple of every panel's width
constexpr int64_t kGradSlab = 256;     // columns per task of the adapter gradients
constexpr int kGradMatrices = 6;

// The kernels of one instruction set for one storage format.
struct Kernels {
    bool compute_is_bf16;
    int64_t panel_columns;
    int64_t (*tasks)(const Pass&, Phase);
    size_t (*scratch_bytes)(const Pass&, Phase);  // per thread
    void (*run)(const Pass&, Phase, int64_t task, void* scratch);
    // The expert (local number) a task works for, -1 when it works for several.
    int32_t (*expert_of)(const Pass&, Phase, int64_t task);
};

namespace reference {
extern const Kernels f32, bf16;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Kernels f32, bf16;
}
namespace avx512 {
extern const Kernels f32, bf16;
}
namespace avx512_bf16 {
extern const Kernels f32, bf16;
}
#endif

}  // namespace kt
