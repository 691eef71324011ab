#include "matmul/matmul.h"

#include "matmul/products/products.h"

namespace pocketllm::POCKETLLM_ISA {

void matmul(const Matrix& w, const uint8_t* x, int tokens, int first_group, int last_group, const Output& out) {
    Product product = product_of_blocks_32(w.format);
    if (!product) product = product_of_blocks_k(w.format);
    if (!product) product = product_of_blocks_vector(w.format);
    product(w, x, tokens, first_group, last_group, out);
}

}  // namespace pocketllm::POCKETLLM_ISA
