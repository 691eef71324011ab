// Exact activations: every weight as the file's decoder rounds it, times floats.
#include <algorithm>

#include "matmul/decode.h"
#include "matmul/matmul.h"
#include "matmul/output.h"

namespace pocketllm::POCKETLLM_ISA {
namespace {

constexpr int kParts = kGroupRows / kLanes;
constexpr int kFloatTile = 8;
constexpr int kAheadBytes = 8192;  // where weights are fetched from memory, before they are decoded
constexpr int kFloatTokens = 64;   // rows of activations that meet a decoded panel
constexpr int kFloatBlocks = 8;    // of a panel: 16 KiB

// sums += weights · x over `blocks` blocks, each added up by itself first, which keeps a long sum's error small.
// weights: [32 · blocks][16], x: rows of ld floats, sums: [tokens][16]
template <int tokens>
void multiply(const float* weights, const float* x, int64_t ld, int cols, float* sums) {
    for (int part = 0; part < kParts; part++) {
        for (int first = 0; first < cols; first += 32) {
            const int last = std::min(first + 32, cols);
            Floats acc[tokens];
            for (Floats& sum : acc) sum = zero();
            for (int col = first; col < last; col++) {
                const Floats w = load(weights + kGroupRows * col + kLanes * part);
                for (int t = 0; t < tokens; t++) acc[t] = fma(w, all(x[ld * t + col]), acc[t]);
            }
            for (int t = 0; t < tokens; t++) {
                float* sum = sums + kGroupRows * t + kLanes * part;
                store(sum, add(load(sum), acc[t]));
            }
        }
    }
}

}  // namespace

void matmul_f32(const Matrix& w, const float* x, int64_t ld, int tokens, int first_group, int last_group,
                const Output& out) {
    const DecodeBlock decode = decoder_of(w.format);
    const Layout layout = layout_of(w.format);
    const size_t block_bytes = unit_bytes(layout) * 32 / layout.unit_cols;
    alignas(64) float weights[kFloatBlocks * 32 * kGroupRows];
    alignas(64) float sums[kFloatTokens * kGroupRows];
    for (int first = 0; first < tokens; first += kFloatTokens) {
        const int count = std::min(kFloatTokens, tokens - first);
        for (int group = first_group; group < last_group; group++) {
            std::memset(sums, 0, sizeof sums);
            for (int col = 0; col < w.cols; col += 32 * kFloatBlocks) {
                const int cols = std::min(32 * kFloatBlocks, w.cols - col);
                for (int i = 0; i < cols; i += 32) {
                    const uint8_t* ahead =
                        w.data + w.group_bytes * group + block_bytes * ((col + i) / 32) + kAheadBytes;
                    for (size_t at = 0; at < block_bytes; at += 64) prefetch(ahead + at);
                    decode(w.data + w.group_bytes * group, (col + i) / 32, std::min(32, cols - i),
                           weights + kGroupRows * i);
                }
                const float* rows = x + ld * first + col;
                int t = 0;
                for (; t + kFloatTile <= count; t += kFloatTile) {
                    multiply<kFloatTile>(weights, rows + ld * t, ld, cols, sums + kGroupRows * t);
                }
                for (; t < count; t++) multiply<1>(weights, rows + ld * t, ld, cols, sums + kGroupRows * t);
            }
            for (int t = 0; t < count; t++) write_group(w, out, group, first + t, sums + kGroupRows * t);
        }
    }
}

}  // namespace pocketllm::POCKETLLM_ISA
