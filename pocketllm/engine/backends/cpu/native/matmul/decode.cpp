#include "matmul/decode.h"

#include "matmul/matmul.h"

namespace pocketllm::POCKETLLM_ISA {

DecodeBlock decoder_of(int32_t format) {
    switch (format) {
        case kF32: return decode_floats<kF32>;
        case kF16: return decode_floats<kF16>;
        case kBF16: return decode_floats<kBF16>;
    }
    return with_weights(format, DecodeBlock{}, [](auto weights) { return DecodeBlock{decode_block<decltype(weights)>}; });
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
