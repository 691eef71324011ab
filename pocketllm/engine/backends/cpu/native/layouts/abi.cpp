#include "layouts/abi.h"

#include <string>

#include "dispatch.h"
#include "layouts/formats.h"
#include "layouts/repack.h"

using namespace pocketllm;

namespace {

bool holds(int32_t format, int32_t cols) {
    const Layout layout = layout_of(format);
    return layout.bits != 0 && cols > 0 && cols % layout.block_cols == 0;
}

const Kernels* kernels_of(const char* isa) {
    std::string why;
    return find_kernels(isa, why);
}

const QuantizedRows* rows_of(const char* isa, int32_t activations) {
    const Kernels* kernels = kernels_of(isa);
    return kernels ? kernels->rows_of(static_cast<Activations>(activations)) : nullptr;
}

Matrix matrix_of(int32_t format, const uint8_t* groups, int32_t rows, int32_t cols) {
    return {format, rows, cols, group_bytes(format, cols), groups};
}

}  // namespace

int64_t pocketllm_group_bytes(int32_t format, int32_t cols) {
    return holds(format, cols) ? int64_t(group_bytes(format, cols)) : 0;
}

double pocketllm_bytes_per_element(int32_t format) {
    const Layout layout = layout_of(format);
    return layout.bits == 0 ? 0 : double(unit_bytes(layout)) / (kGroupRows * layout.unit_cols);
}

int32_t pocketllm_repack(int32_t format, const uint8_t* file, int32_t rows, int32_t cols, int32_t first_group,
                         int32_t last_group, const int8_t* grid, uint8_t* groups) {
    if (!holds(format, cols) || first_group < 0 || last_group > (rows + kGroupRows - 1) / kGroupRows) return 0;
    repack(format, file, rows, cols, first_group, last_group, grid, groups);
    return 1;
}

int32_t pocketllm_decode_row(const char* isa, int32_t format, const uint8_t* groups, int32_t rows, int32_t cols,
                             int32_t row, float* out) {
    const Kernels* kernels = kernels_of(isa);
    if (!kernels || !holds(format, cols) || row < 0 || row >= rows) return 0;
    kernels->decode_row(matrix_of(format, groups, rows, cols), row, out);
    return 1;
}

int64_t pocketllm_quantized_bytes(const char* isa, int32_t activations, int32_t cols) {
    const QuantizedRows* quantized = rows_of(isa, activations);
    return quantized && cols > 0 ? int64_t(quantized->bytes(cols)) : 0;
}

int32_t pocketllm_quantize(const char* isa, int32_t activations, const float* x, int32_t rows, int32_t cols,
                           const float* norm, float eps, uint8_t* out) {
    const QuantizedRows* quantized = rows_of(isa, activations);
    if (!quantized || cols <= 0) return 0;
    quantized->quantize(x, cols, cols, 0, rows, norm, eps, out);
    return 1;
}

int32_t pocketllm_matmul(const char* isa, int32_t activations, int32_t format, const uint8_t* groups, int32_t rows,
                         int32_t cols, const uint8_t* x, int32_t tokens, const float* bias, const float* residual,
                         float* y) {
    const QuantizedRows* quantized = rows_of(isa, activations);
    if (!quantized || !holds(format, cols) || is_float_format(format)) return 0;
    const Output out{y, rows, bias, residual, rows};
    quantized->matmul(matrix_of(format, groups, rows, cols), x, tokens, 0, (rows + kGroupRows - 1) / kGroupRows, out);
    return 1;
}

int32_t pocketllm_matmul_f32(const char* isa, int32_t format, const uint8_t* groups, int32_t rows, int32_t cols,
                             const float* x, int32_t tokens, const float* bias, const float* residual, float* y) {
    const Kernels* kernels = kernels_of(isa);
    if (!kernels || !holds(format, cols)) return 0;
    const Output out{y, rows, bias, residual, rows};
    kernels->matmul_f32(matrix_of(format, groups, rows, cols), x, cols, tokens, 0, (rows + kGroupRows - 1) / kGroupRows,
                        out);
    return 1;
}
