// The table of one instruction set: this file is compiled once for each, in that one's namespace.
#include "kernels.h"

namespace pocketllm::POCKETLLM_ISA {

extern const Kernels kernels;
const Kernels kernels = {
    POCKETLLM_ISA_NAME,
    nullptr,  // quantized_bytes
    nullptr,  // quantize
    nullptr,  // matmul
    nullptr,  // matmul_f32
    nullptr,  // decode_row
};

}  // namespace pocketllm::POCKETLLM_ISA
