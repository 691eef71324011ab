// All quantized formats, for functions that are made once for each.
#pragma once

#include "matmul/weights/blocks_32.h"
#include "matmul/weights/blocks_k.h"
#include "matmul/weights/blocks_vector.h"

namespace pocketllm::POCKETLLM_ISA {

// What `use` makes of the format's weights (a value of its type in weights/); `otherwise` for what is not quantized.
template <typename Result, typename Use>
Result with_weights(int32_t format, Result otherwise, Use use) {
    switch (format) {
        case kQ4_0: return use(Q4_0{});
        case kQ4_1: return use(Q4_1{});
        case kQ5_0: return use(Q5_0{});
        case kQ5_1: return use(Q5_1{});
        case kQ8_0: return use(Q8_0{});
        case kIQ4_NL: return use(IQ4_NL{});
        case kMXFP4: return use(MXFP4{});
        case kNVFP4: return use(NVFP4{});
        case kNVFP4_SCALED: return use(NVFP4_SCALED{});
        case kFP8: return use(FP8{});
        case kQ2_K: return use(Q2_K{});
        case kQ3_K: return use(Q3_K{});
        case kQ4_K: return use(Q4_K{});
        case kQ5_K: return use(Q5_K{});
        case kQ6_K: return use(Q6_K{});
        case kIQ4_XS: return use(IQ4_XS{});
        case kIQ1_S: return use(IQ1_S{});
        case kIQ1_M: return use(IQ1_M{});
        case kIQ2_XXS: return use(IQ2_XXS{});
        case kIQ2_XS: return use(IQ2_XS{});
        case kIQ2_S: return use(IQ2_S{});
        case kIQ3_XXS: return use(IQ3_XXS{});
        case kIQ3_S: return use(IQ3_S{});
        case kTQ1_0: return use(TQ1_0{});
        case kTQ2_0: return use(TQ2_0{});
        case kQ1_0: return use(Q1_0{});
        case kQ2_0: return use(Q2_0{});
        case kPQ2_0: return use(PQ2_0{});
        case kPTQ1_0: return use(PTQ1_0{});
    }
    return otherwise;
}

}  // namespace pocketllm::POCKETLLM_ISA
