#include "matmul/weights/blocks_vector.h"

#include "matmul/products/product.h"
#include "matmul/products/products.h"

namespace pocketllm::POCKETLLM_ISA {

Product product_of_blocks_vector(int32_t format) {
    switch (format) {
        case kIQ1_S: return product<IQ1_S>;
        case kIQ1_M: return product<IQ1_M>;
        case kIQ2_XXS: return product<IQ2_XXS>;
        case kIQ2_XS: return product<IQ2_XS>;
        case kIQ2_S: return product<IQ2_S>;
        case kIQ3_XXS: return product<IQ3_XXS>;
        case kIQ3_S: return product<IQ3_S>;
        case kTQ1_0: return product<TQ1_0>;
        case kTQ2_0: return product<TQ2_0>;
        case kQ1_0: return product<Q1_0>;
        case kQ2_0: return product<Q2_0>;
        case kPQ2_0: return product<PQ2_0>;
        case kPTQ1_0: return product<PTQ1_0>;
    }
    return nullptr;
}

}  // namespace pocketllm::POCKETLLM_ISA
