#include "matmul/weights/blocks_k.h"

#include "matmul/products/product.h"
#include "matmul/products/products.h"

namespace pocketllm::POCKETLLM_ISA {

template <typename Block>
Product product_of_blocks_k(int32_t format) {
    switch (format) {
        case kQ2_K: return product<Q2_K, Block>;
        case kQ3_K: return product<Q3_K, Block>;
        case kQ4_K: return product<Q4_K, Block>;
        case kQ5_K: return product<Q5_K, Block>;
        case kQ6_K: return product<Q6_K, Block>;
        case kIQ4_XS: return product<IQ4_XS, Block>;
    }
    return nullptr;
}

template Product product_of_blocks_k<Int8Block>(int32_t);
template Product product_of_blocks_k<Int16Block>(int32_t);

}  // namespace pocketllm::POCKETLLM_ISA
