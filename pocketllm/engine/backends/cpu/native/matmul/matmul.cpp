#include "matmul/matmul.h"

#include "matmul/product.h"
#include "matmul/weights/blocks_32.h"
#include "matmul/weights/blocks_k.h"
#include "matmul/weights/blocks_vector.h"

namespace pocketllm::POCKETLLM_ISA {
namespace {

using Product = void (*)(const Matrix&, const uint8_t*, int, int, int, const Output&);

Product product_of(int32_t format) {
    switch (format) {
        case kQ4_0: return product<Q4_0>;
        case kQ4_1: return product<Q4_1>;
        case kQ5_0: return product<Q5_0>;
        case kQ5_1: return product<Q5_1>;
        case kQ8_0: return product<Q8_0>;
        case kIQ4_NL: return product<IQ4_NL>;
        case kMXFP4: return product<MXFP4>;
        case kNVFP4: return product<NVFP4>;
        case kQ2_K: return product<Q2_K>;
        case kQ3_K: return product<Q3_K>;
        case kQ4_K: return product<Q4_K>;
        case kQ5_K: return product<Q5_K>;
        case kQ6_K: return product<Q6_K>;
        case kIQ4_XS: return product<IQ4_XS>;
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
        case kPQ2_0: return product<PQ2_0>;
        case kPTQ1_0: return product<PTQ1_0>;
    }
    return nullptr;
}

}  // namespace

void matmul(const Matrix& w, const uint8_t* x, int tokens, int first_group, int last_group, const Output& out) {
    product_of(w.format)(w, x, tokens, first_group, last_group, out);
}

}  // namespace pocketllm::POCKETLLM_ISA
