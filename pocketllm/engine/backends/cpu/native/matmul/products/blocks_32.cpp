#include "matmul/weights/blocks_32.h"

#include "matmul/products/product.h"
#include "matmul/products/products.h"

namespace pocketllm::POCKETLLM_ISA {

Product product_of_blocks_32(int32_t format) {
    switch (format) {
        case kQ4_0: return product<Q4_0>;
        case kQ4_1: return product<Q4_1>;
        case kQ5_0: return product<Q5_0>;
        case kQ5_1: return product<Q5_1>;
        case kQ8_0: return product<Q8_0>;
        case kIQ4_NL: return product<IQ4_NL>;
        case kMXFP4: return product<MXFP4>;
        case kNVFP4: return product<NVFP4>;
        case kNVFP4_SCALED: return product<NVFP4_SCALED>;
    }
    return nullptr;
}

}  // namespace pocketllm::POCKETLLM_ISA
