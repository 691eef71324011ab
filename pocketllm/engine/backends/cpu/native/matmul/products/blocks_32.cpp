#include "matmul/weights/blocks_32.h"

#include "matmul/products/product.h"
#include "matmul/products/products.h"

namespace pocketllm::POCKETLLM_ISA {

template <typename Block>
Product product_of_blocks_32(int32_t format) {
    switch (format) {
        case kQ4_0: return product<Q4_0, Block>;
        case kQ4_1: return product<Q4_1, Block>;
        case kQ5_0: return product<Q5_0, Block>;
        case kQ5_1: return product<Q5_1, Block>;
        case kQ8_0: return product<Q8_0, Block>;
        case kIQ4_NL: return product<IQ4_NL, Block>;
        case kMXFP4: return product<MXFP4, Block>;
        case kNVFP4: return product<NVFP4, Block>;
        case kNVFP4_SCALED: return product<NVFP4_SCALED, Block>;
    }
    return nullptr;
}

template Product product_of_blocks_32<Int8Block>(int32_t);
template Product product_of_blocks_32<Int16Block>(int32_t);

}  // namespace pocketllm::POCKETLLM_ISA
