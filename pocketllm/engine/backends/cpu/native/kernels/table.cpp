// The table of one instruction set: this file is compiled once for each, in that one's namespace.
#include "attention/attention.h"
#include "elementwise/rows.h"
#include "kernels.h"
#include "matmul/activations.h"
#include "matmul/matmul.h"

namespace pocketllm::POCKETLLM_ISA {

extern const Kernels kernels;
const Kernels kernels = {
    POCKETLLM_ISA_NAME,
    quantized_bytes,
    quantize,
    matmul,
    matmul_f32,
    decode_row,
    rms_norm,
    add,
    scale,
    silu_mul,
    gelu_mul,
    rope,
    store_kv,
    attend,
    merge,
};

}  // namespace pocketllm::POCKETLLM_ISA
