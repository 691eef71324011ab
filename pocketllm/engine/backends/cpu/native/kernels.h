// The seam inside the native library: what the runtime (program, threads) asks of the kernels, once per instruction set.
//
// Each instruction set compiles the same kernel sources with its own flags and fills one `Kernels` table; dispatch.cpp
// picks one table at start-up by CPUID. Every kernel computes a row the same way whatever other rows stand beside it, so
// that a row's bits do not depend on the batch; none allocates, locks or starts a thread: the runtime hands each call a
// range of the work and the scratch it needs.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pocketllm {

constexpr int kGroupRows = 16;  // rows of a matrix that are interleaved, so that one vector serves 16 outputs

// A weight [rows, cols] as the backend keeps it: groups of 16 rows, interleaved; layouts/ says how for each format.
struct Matrix {
    int32_t format;       // layouts/formats.h
    int32_t rows, cols;   // as in the file; the last group is filled up with zero rows
    size_t group_bytes;   // bytes of one group of 16 rows
    const uint8_t* data;  // 64-byte aligned
};

// Where a projection's outputs go: y[token * ld + row] = x·w (+ bias[row]) (+ residual[token * ld_residual + row]).
struct Output {
    float* y;
    int64_t ld;
    const float* bias;      // [rows] or null
    const float* residual;  // or null; may be y itself
    int64_t ld_residual;
};

struct Kernels {
    const char* name;  // avx512vnni, avx512, avx2, portable, neon

    // -- rows on their way into a matrix (kernels/quantize.*) ---------------------------------------------------------
    // Bytes of one row of `cols` activations as `quantize` keeps it: int8 values, a float scale per 32, sums per block.
    size_t (*quantized_bytes)(int cols);
    // rows [first, last) of x (leading dimension ld, floats) → out (quantized_bytes(cols) each, row 0 at out).
    // norm: RMS-norm each row with this weight [cols] and eps on the way; null: as they are.
    void (*quantize)(const float* x, int64_t ld, int cols, int first, int last, const float* norm, float eps, uint8_t* out);

    // -- matrix products (kernels/matmul*) ----------------------------------------------------------------------------
    // Output rows of groups [first_group, last_group) for all `tokens` quantized rows.
    void (*matmul)(const Matrix& w, const uint8_t* x, int tokens, int first_group, int last_group, const Output& out);
    // The same with float activations, exactly decoded weights (`--activation-dtype float32`, and float formats).
    void (*matmul_f32)(const Matrix& w, const float* x, int64_t ld, int tokens, int first_group, int last_group,
                       const Output& out);
    // Decode one row of a matrix to floats [cols]: embeddings, tests.
    void (*decode_row)(const Matrix& w, int row, float* out);

    // -- everything between matrices (kernels/elementwise.*, kernels/attention.*) --------------------------------------
    // Owned by the runtime's author; extend as needed.
};

}  // namespace pocketllm
