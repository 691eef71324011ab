#include "matmul/weights/blocks_k.h"

#include "matmul/products/product.h"
#include "matmul/products/products.h"

namespace pocketllm::POCKETLLM_ISA {

Product product_of_blocks_k(int32_t format) {
    switch (format) {
        case kQ2_K: return product<Q2_K>;
        case kQ3_K: return product<Q3_K>;
        case kQ4_K: return product<Q4_K>;
        case kQ5_K: return product<Q5_K>;
        case kQ6_K: return product<Q6_K>;
        case kIQ4_XS: return product<IQ4_XS>;
    }
    return nullptr;
}

}  // namespace pocketllm::POCKETLLM_ISA
