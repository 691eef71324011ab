// The product of one format's matrix with quantized rows.
//
// Few rows (decode): straight from the packed codes, which come from memory once. Many rows (prefill): the codes of a
// panel, 16 rows · kPanelBlocks blocks, are unpacked once into the first-level cache and meet all rows there.
#pragma once

#include <algorithm>

#include "matmul/output.h"
#include "matmul/tile.h"

namespace pocketllm::POCKETLLM_ISA {

constexpr int kParts = kGroupRows / kLanes;
constexpr int kPanelBlocks = 16;    // 8 KiB of codes
constexpr int kPanelTokens = 256;   // rows of activations whose sums wait in the second-level cache
constexpr int kPrefetchBytes = 4096;

inline int blocks_of(const Matrix& w, const Layout& layout) {
    return (w.cols + layout.unit_cols - 1) / layout.unit_cols * (layout.unit_cols / 32);
}

// One group and `tokens` rows, from packed codes.
template <typename W, int tokens>
inline void direct_group(const Matrix& w, const Rows& x, int first_token, int group, const Output& out) {
    constexpr Layout kLayout = W::kLayout;
    constexpr int kUnitBlocks = kLayout.unit_cols / 32;
    constexpr int kBlockBytes = 64 * kLayout.bits;
    const int units = blocks_of(w, kLayout) / kUnitBlocks;
    const uint8_t* unit = w.data + w.group_bytes * group;
    Floats acc[kParts][tokens];
    for (auto& part : acc) {
        for (Floats& sum : part) sum = zero();
    }
    for (int u = 0; u < units; u++, unit += unit_bytes(kLayout)) {
        for (int at = 0; at < kLayout.header_bytes; at += 64) prefetch(unit + kPrefetchBytes + at);
        for (int b = 0; b < kUnitBlocks; b++) {
            const uint8_t* packed = unit + kLayout.header_bytes + kBlockBytes * b;
            for (int at = 0; at < kBlockBytes; at += 64) prefetch(packed + kPrefetchBytes + at);
            for (int part = 0; part < kParts; part++) {
                Bytes codes[kSteps];
                Scales scales;
                W::codes(unit, packed, b, part, codes);
                W::scales(unit, b, part, scales);
                for (int t = 0; t < tokens; t++) {
                    acc[part][t] = add_block<W, tokens < 4>(acc[part][t], codes, scales, x.at(t, kUnitBlocks * u + b));
                }
            }
        }
    }
    for (int t = 0; t < tokens; t++) {
        alignas(64) float sums[kGroupRows];
        for (int part = 0; part < kParts; part++) store(sums + kLanes * part, acc[part][t]);
        write_group(w, out, group, first_token + t, sums);
    }
}

// 16 rows · up to kPanelBlocks blocks, unpacked.
template <typename W>
struct Panel {
    static constexpr int kScales = 32 / W::kScaleCols;
    alignas(64) uint8_t codes[kPanelBlocks][kParts][kSteps][kPartBytes];
    alignas(64) float d[kPanelBlocks][kParts][kScales][kLanes];
    alignas(64) float m[W::kMin ? kPanelBlocks : 1][kParts][kScales][kLanes];

    // Blocks [first, first + count) of a group.
    void unpack(const uint8_t* group, int first, int count) {
        constexpr Layout kLayout = W::kLayout;
        constexpr int kUnitBlocks = kLayout.unit_cols / 32;
        for (int i = 0; i < count; i++) {
            const int b = (first + i) % kUnitBlocks;
            const uint8_t* unit = group + unit_bytes(kLayout) * ((first + i) / kUnitBlocks);
            for (int part = 0; part < kParts; part++) {
                Bytes steps[kSteps];
                Scales scales;
                W::codes(unit, unit + kLayout.header_bytes + 64 * kLayout.bits * b, b, part, steps);
                W::scales(unit, b, part, scales);
                for (int s = 0; s < kSteps; s++) store_codes(codes[i][part][s], steps[s]);
                for (int s = 0; s < kScales; s++) {
                    store(d[i][part][s], scales.d[s]);
                    if (W::kMin) store(m[i][part][s], scales.m[s]);
                }
            }
        }
    }

    // sums += the panel's product with `tokens` rows from block `first` on. sums: [tokens][16]
    template <int tokens>
    void multiply(const Rows& x, int first, int count, float* sums) const {
        for (int part = 0; part < kParts; part++) {
            Floats acc[tokens];
            for (int t = 0; t < tokens; t++) acc[t] = load(sums + kGroupRows * t + kLanes * part);
            for (int i = 0; i < count; i++) {
                Bytes steps[kSteps];
                Scales scales;
                for (int s = 0; s < kSteps; s++) steps[s] = load_codes(codes[i][part][s]);
                for (int s = 0; s < kScales; s++) {
                    scales.d[s] = load(d[i][part][s]);
                    if (W::kMin) scales.m[s] = load(m[i][part][s]);
                }
                for (int t = 0; t < tokens; t++) {
                    acc[t] = add_block<W, tokens == 1>(acc[t], steps, scales, x.at(t, first + i));
                }
            }
            for (int t = 0; t < tokens; t++) store(sums + kGroupRows * t + kLanes * part, acc[t]);
        }
    }
};

// One group and up to kPanelTokens rows, panel by panel.
template <typename W>
void panel_group(const Matrix& w, const Rows& x, int first_token, int tokens, int group, const Output& out) {
    Panel<W> panel;
    alignas(64) float sums[kPanelTokens * kGroupRows];
    std::memset(sums, 0, sizeof(float) * kGroupRows * tokens);
    const int blocks = blocks_of(w, W::kLayout);
    for (int first = 0; first < blocks; first += kPanelBlocks) {
        const int count = std::min(kPanelBlocks, blocks - first);
        panel.unpack(w.data + w.group_bytes * group, first, count);
        int t = 0;
        const auto tile = [&](int row) { return Rows{x.data + x.stride * row, x.stride}; };
        for (; t + kTile <= tokens; t += kTile) panel.template multiply<kTile>(tile(t), first, count, sums + kGroupRows * t);
        for (; t + 2 <= tokens; t += 2) panel.template multiply<2>(tile(t), first, count, sums + kGroupRows * t);
        for (; t < tokens; t++) panel.template multiply<1>(tile(t), first, count, sums + kGroupRows * t);
    }
    for (int t = 0; t < tokens; t++) write_group(w, out, group, first_token + t, sums + kGroupRows * t);
}

template <typename W>
void product(const Matrix& w, const uint8_t* data, int tokens, int first_group, int last_group, const Output& out) {
    const size_t stride = quantized_bytes(w.cols);
    for (int first = 0; first < tokens; first += kPanelTokens) {
        const int count = std::min(kPanelTokens, tokens - first);
        const Rows x{data + stride * first, stride};
        for (int group = first_group; group < last_group; group++) {
            if (count == 1) direct_group<W, 1>(w, x, first, group, out);
            else if (count == kTile) direct_group<W, kTile>(w, x, first, group, out);
            else panel_group<W>(w, x, first, count, group, out);
        }
    }
}

}  // namespace pocketllm::POCKETLLM_ISA
