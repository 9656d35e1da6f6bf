// The experts' matrices as a checkpoint stores them. Nothing is repacked: a decoder reads them in place.
#pragma once

#include <cstdint>

namespace kt {

// X(name) for every format.
// clang-format off
#define KT_FORMATS(X) \
    X(f32) X(bf16) X(fp8) X(mxfp4) X(nvfp4) X(int8) X(int4) X(uint4) \
    X(q8_0) X(q4_0) X(q5_0) X(q5_1) X(q4_k) X(q5_k) X(q6_k)
// clang-format on

#define KT_FORMAT(name) name,
enum class Format : int32_t { KT_FORMATS(KT_FORMAT) };
#undef KT_FORMAT

// f16 is the IEEE half; ue8m0 is 2^(byte - 127), 255 a NaN.
enum class ScaleType : int32_t { none, f32, bf16, f16, ue8m0 };

// One expert's projection: W[n][k], n < rows, k < cols; the projection is W x.
struct Matrix {
    Format format;
    ScaleType scale_type;
    const uint8_t* data;
    int64_t row_bytes;        // between rows n
    int64_t col_bytes;        // f32, bf16 only: between elements k
    const uint8_t* scales;    // uint4: those of a row, then as many zero points, numbers of the same type
    int64_t scale_row_bytes;  // between rows of scales; the scales of a row are contiguous
    int64_t block_rows;       // one scale covers so many rows: fp8 < 4096 or all, others 1 ...
    int64_t block_cols;       // ... by so many columns: a multiple of 32, or all of them
    int64_t rows;
    int64_t cols;
};

// One projection of all local experts.
struct ExpertMatrices {
    Matrix first;
    int64_t expert_bytes;
    int64_t scale_expert_bytes;

    // Always inlined: an instruction set's object must not define a symbol that others could link to.
    [[gnu::always_inline]] inline Matrix at(int64_t expert) const {
        Matrix m = first;
        m.data += expert * expert_bytes;
        if (m.scales != nullptr) m.scales += expert * scale_expert_bytes;
        return m;
    }
};

}  // namespace kt
