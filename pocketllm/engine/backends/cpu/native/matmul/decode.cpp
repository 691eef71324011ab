#include "matmul/decode.h"

#include "matmul/matmul.h"

namespace pocketllm::POCKETLLM_ISA {

DecodeBlock decoder_of(int32_t format) {
    switch (format) {
        case kF32: return decode_floats<kF32>;
        case kF16: return decode_floats<kF16>;
        case kBF16: return decode_floats<kBF16>;
        case kQ4_0: return decode_block<Q4_0>;
        case kQ4_1: return decode_block<Q4_1>;
        case kQ5_0: return decode_block<Q5_0>;
        case kQ5_1: return decode_block<Q5_1>;
        case kQ8_0: return decode_block<Q8_0>;
        case kIQ4_NL: return decode_block<IQ4_NL>;
        case kMXFP4: return decode_block<MXFP4>;
        case kNVFP4: return decode_block<NVFP4>;
        case kQ2_K: return decode_block<Q2_K>;
        case kQ3_K: return decode_block<Q3_K>;
        case kQ4_K: return decode_block<Q4_K>;
        case kQ5_K: return decode_block<Q5_K>;
        case kQ6_K: return decode_block<Q6_K>;
        case kIQ4_XS: return decode_block<IQ4_XS>;
        case kIQ1_S: return decode_block<IQ1_S>;
        case kIQ1_M: return decode_block<IQ1_M>;
        case kIQ2_XXS: return decode_block<IQ2_XXS>;
        case kIQ2_XS: return decode_block<IQ2_XS>;
        case kIQ2_S: return decode_block<IQ2_S>;
        case kIQ3_XXS: return decode_block<IQ3_XXS>;
        case kIQ3_S: return decode_block<IQ3_S>;
        case kTQ1_0: return decode_block<TQ1_0>;
        case kTQ2_0: return decode_block<TQ2_0>;
        case kQ1_0: return decode_block<Q1_0>;
        case kQ2_0: return decode_block<Q2_0>;
        case kPQ2_0: return decode_block<PQ2_0>;
        case kPTQ1_0: return decode_block<PTQ1_0>;
    }
    return nullptr;
}

void decode_row(const Matrix& w, int row, float* out) {
    const DecodeBlock decode = decoder_of(w.format);
    const uint8_t* group = w.data + w.group_bytes * (row / kGroupRows);
    alignas(64) float block[32 * kGroupRows];
    for (int first = 0; first < w.cols; first += 32) {
        const int count = w.cols - first < 32 ? w.cols - first : 32;
        decode(group, first / 32, count, block);
        for (int i = 0; i < count; i++) out[first + i] = block[kGroupRows * i + row % kGroupRows];
    }
}

}  // namespace pocketllm::POCKETLLM_ISA
