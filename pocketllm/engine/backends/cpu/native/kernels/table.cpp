// The table of one instruction set: this file is compiled once for each, in that one's namespace.
#include "attention/attention.h"
#include "elementwise/recurrent.h"
#include "elementwise/rows.h"
#include "kernels.h"
#include "matmul/activations.h"
#include "matmul/matmul.h"

namespace pocketllm::POCKETLLM_ISA {

extern const Kernels kernels;
const Kernels kernels = {
    POCKETLLM_ISA_NAME,
    {quantized_bytes<Int8Block>, quantize<Int8Block>, matmul<Int8Block>},
    {quantized_bytes<Int16Block>, quantize<Int16Block>, matmul<Int16Block>},
    matmul_f32,
    decode_row,
    rms_norm,
    layer_norm,
    add,
    scale,
    silu_mul,
    gelu_mul,
    bounded_mul,
    limited_mul,
    sigmoid_mul,
    mul,
    hadamard,
    rope,
    store_kv,
    load_latent,
    index_scores,
    attend,
    merge,
    causal_conv,
    gated_delta,
};

}  // namespace pocketllm::POCKETLLM_ISA
