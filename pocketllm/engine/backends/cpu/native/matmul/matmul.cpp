#include "matmul/matmul.h"

#include "matmul/activations.h"
#include "matmul/products/products.h"

namespace pocketllm::POCKETLLM_ISA {

template <typename Block>
void matmul(const Matrix& w, const uint8_t* x, int tokens, int first_group, int last_group, const Output& out) {
    Product product = product_of_blocks_32<Block>(w.format);
    if (!product) product = product_of_blocks_k<Block>(w.format);
    if (!product) product = product_of_blocks_vector<Block>(w.format);
    product(w, x, tokens, first_group, last_group, out);
}

template void matmul<Int8Block>(const Matrix&, const uint8_t*, int, int, int, const Output&);
template void matmul<Int16Block>(const Matrix&, const uint8_t*, int, int, int, const Output&);

}  // namespace pocketllm::POCKETLLM_ISA
