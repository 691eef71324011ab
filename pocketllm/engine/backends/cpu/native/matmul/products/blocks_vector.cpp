#include "matmul/weights/blocks_vector.h"

#include "matmul/products/product.h"
#include "matmul/products/products.h"

namespace pocketllm::POCKETLLM_ISA {

template <typename Block>
Product product_of_blocks_vector(int32_t format) {
    switch (format) {
        case kIQ1_S: return product<IQ1_S, Block>;
        case kIQ1_M: return product<IQ1_M, Block>;
        case kIQ2_XXS: return product<IQ2_XXS, Block>;
        case kIQ2_XS: return product<IQ2_XS, Block>;
        case kIQ2_S: return product<IQ2_S, Block>;
        case kIQ3_XXS: return product<IQ3_XXS, Block>;
        case kIQ3_S: return product<IQ3_S, Block>;
        case kTQ1_0: return product<TQ1_0, Block>;
        case kTQ2_0: return product<TQ2_0, Block>;
        case kQ1_0: return product<Q1_0, Block>;
        case kQ2_0: return product<Q2_0, Block>;
        case kPQ2_0: return product<PQ2_0, Block>;
        case kPTQ1_0: return product<PTQ1_0, Block>;
    }
    return nullptr;
}

template Product product_of_blocks_vector<Int8Block>(int32_t);
template Product product_of_blocks_vector<Int16Block>(int32_t);

}  // namespace pocketllm::POCKETLLM_ISA
