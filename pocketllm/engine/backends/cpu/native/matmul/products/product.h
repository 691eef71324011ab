// The product of one format's matrix with quantized rows.
//
// Few rows (decode): straight from the packed codes, which come from memory once. Many rows (prefill): the codes of a
// panel, some groups · kPanelBlocks blocks, are unpacked once into the first-level cache and meet all rows there.
#pragma once

#include <algorithm>

#include "matmul/output.h"
#include "matmul/products/tile.h"

namespace pocketllm::POCKETLLM_ISA {

constexpr int kParts = kGroupRows / kLanes;
constexpr int kPrefetchBytes = 8192;

inline int blocks_of(const Matrix& w, const Layout& layout) {
    return (w.cols + layout.unit_cols - 1) / layout.unit_cols * (layout.unit_cols / 32);
}

// -- few rows ---------------------------------------------------------------------------------------------------------
// One group and `count` rows of activations in a tile of `tokens`, from packed codes.
template <typename W, typename Block, int tokens>
void direct_group(const Matrix& w, const FilledRows<Block, tokens>& x, int first_token, int count, int group,
                  const Output& out) {
    constexpr Layout kLayout = W::kLayout;
    constexpr int kUnitBlocks = kLayout.unit_cols / 32;
    constexpr int kBlockBytes = 64 * kLayout.bits;
    const int units = blocks_of(w, kLayout) / kUnitBlocks;
    const uint8_t* unit = w.data + w.group_bytes * group;
    Floats acc[kParts][1][tokens];
    for (auto& part : acc) {
        for (Floats& sum : part[0]) sum = zero();
    }
    for (int u = 0; u < units; u++, unit += unit_bytes(kLayout)) {
        for (int at = 0; at < kLayout.header_bytes; at += 64) prefetch_once(unit + kPrefetchBytes + at);
        for (int b = 0; b < kUnitBlocks; b++) {
            const uint8_t* packed = unit + kLayout.header_bytes + kBlockBytes * b;
            for (int at = 0; at < kBlockBytes; at += 64) prefetch_once(packed + kPrefetchBytes + at);
            for (int part = 0; part < kParts; part++) {
                Bytes codes[kSteps];
                Scales scales;
                W::codes(unit, packed, b, part, codes);
                W::scales(unit, b, part, scales);
                scales.total = total_of<W>(codes, scales);
                add_block<W>(acc[part], [&](int, int step) { return codes[step]; }, [&](int) { return scales; }, x,
                             kUnitBlocks * u + b);
            }
        }
    }
    for (int t = 0; t < count; t++) {
        alignas(64) float sums[kGroupRows];
        for (int part = 0; part < kParts; part++) store(sums + kLanes * part, acc[part][0][t]);
        write_group(w, out, group, first_token + t, sums);
    }
}

template <typename W, int tokens, typename Block>
void direct_groups(const Matrix& w, const Rows<Block>& rows, int first_token, int count, int first_group,
                   int last_group, const Output& out) {
    const FilledRows<Block, tokens> x(rows, count);
    for (int group = first_group; group < last_group; group++) {
        direct_group<W>(w, x, first_token, count, group, out);
    }
}

template <typename W, typename Block>
void direct(const Matrix& w, const Rows<Block>& x, int first_token, int count, int first_group, int last_group,
            const Output& out) {
    if (count == 1) return direct_groups<W, 1>(w, x, first_token, count, first_group, last_group, out);
    if (count == 2) return direct_groups<W, 2>(w, x, first_token, count, first_group, last_group, out);
    if (count <= 4) return direct_groups<W, 4>(w, x, first_token, count, first_group, last_group, out);
    if constexpr (kDirectTokens > 4) {
        if (count <= 6) return direct_groups<W, 6>(w, x, first_token, count, first_group, last_group, out);
        return direct_groups<W, 8>(w, x, first_token, count, first_group, last_group, out);
    }
}

// -- many rows --------------------------------------------------------------------------------------------------------
constexpr int kPanelBlocks = 8;
constexpr int kPanelTokens = 264;  // rows of activations whose sums wait in the second-level cache

// kTileVectors vectors of rows · up to kPanelBlocks blocks, unpacked.
template <typename W>
struct Panel {
    static constexpr int kScales = 32 / W::kScaleCols;
    static constexpr int kVectors = kTileVectors;
    static constexpr int kTokens = W::kScaleCols == 32 ? kTileTokens : kTileTokens16;
    struct Unpacked {
        uint8_t codes[kVectors][kSteps][kPartBytes];
        float d[kVectors][kScales][kLanes];
        float m[kVectors][W::kMin ? kScales : 0][kLanes];
        float total[kVectors][kLanes];
    };
    alignas(64) Unpacked blocks[kPanelBlocks];

    // Vector `v` becomes part `part` of a group's blocks [first, first + count).
    void unpack(int v, const uint8_t* group, int part, int first, int count) {
        constexpr Layout kLayout = W::kLayout;
        constexpr int kUnitBlocks = kLayout.unit_cols / 32;
        for (int i = 0; i < count; i++) {
            const int b = (first + i) % kUnitBlocks;
            const uint8_t* unit = group + unit_bytes(kLayout) * ((first + i) / kUnitBlocks);
            Bytes steps[kSteps];
            Scales scales;
            W::codes(unit, unit + kLayout.header_bytes + 64 * kLayout.bits * b, b, part, steps);
            W::scales(unit, b, part, scales);
            for (int s = 0; s < kSteps; s++) store_codes(blocks[i].codes[v][s], steps[s]);
            for (int s = 0; s < kScales; s++) {
                store(blocks[i].d[v][s], scales.d[s]);
                if constexpr (W::kMin) store(blocks[i].m[v][s], scales.m[s]);
            }
            store(blocks[i].total[v], total_of<W>(steps, scales));
        }
    }

    // sums += the panel's product with `tokens` rows from block `first` on. sums: [tokens][kVectors * kLanes]
    template <int tokens, typename Block>
    void multiply(const Rows<Block>& x, int first, int count, float* sums) const {
        Floats acc[kVectors][tokens];
        POCKETLLM_UNROLL for (int t = 0; t < tokens; t++) {
            POCKETLLM_UNROLL for (int v = 0; v < kVectors; v++) acc[v][t] = load(sums + kLanes * (kVectors * t + v));
        }
        for (int i = 0; i < count; i++) {
            const Unpacked& block = blocks[i];
            const auto scales_of = [&](int v) {
                Scales scales;
                for (int s = 0; s < kScales; s++) {
                    scales.d[s] = load(block.d[v][s]);
                    if constexpr (W::kMin) scales.m[s] = load(block.m[v][s]);
                }
                scales.total = load(block.total[v]);
                return scales;
            };
            add_block<W>(
                acc, [&](int v, int step) { return load_codes(block.codes[v][step]); }, scales_of, x, first + i);
        }
        POCKETLLM_UNROLL for (int t = 0; t < tokens; t++) {
            POCKETLLM_UNROLL for (int v = 0; v < kVectors; v++) store(sums + kLanes * (kVectors * t + v), acc[v][t]);
        }
    }
};

// The packed codes of the panel after one that begins at `vector` and `first`: a tile's worth of them at a time goes
// into the second-level cache while that one is multiplied.
template <typename W>
struct Upcoming {
    static constexpr int kGroups = std::max(1, kTileVectors / kParts);
    const uint8_t* at;
    size_t group_bytes, left, step;

    Upcoming(const Matrix& w, int vector, int first, int blocks, int tiles) : group_bytes(w.group_bytes) {
        constexpr int kUnitBlocks = W::kLayout.unit_cols / 32;
        const bool same_rows = first + kPanelBlocks < blocks;
        const int group = (same_rows ? vector : vector + kTileVectors) / kParts;
        at = w.data + w.group_bytes * group +
             (same_rows ? unit_bytes(W::kLayout) * ((first + kPanelBlocks) / kUnitBlocks) : 0);
        left = unit_bytes(W::kLayout) * (kPanelBlocks / kUnitBlocks);
        step = (left / std::max(tiles, 1) + 64) / 64 * 64;
    }
    void fetch() {
        const size_t here = std::min(step, left);
        for (int group = 0; group < kGroups; group++) {
            for (size_t line = 0; line < here; line += 64) prefetch_far(at + group_bytes * group + line);
        }
        at += here;
        left -= here;
    }
};

// Vectors [vector, vector + kTileVectors) of rows, as far as there are any, and up to kPanelTokens rows of activations.
template <typename W, typename Block>
struct PanelRows {
    using P = Panel<W>;
    static constexpr int kRow = kLanes * P::kVectors;
    const Matrix& w;
    const Rows<Block>& x;
    const Output& out;
    int first_token, tokens, vector, last_vector;
    P panel;
    alignas(64) float sums[kPanelTokens * kRow];

    void run() {
        std::memset(sums, 0, sizeof(float) * kRow * tokens);
        const int blocks = blocks_of(w, W::kLayout);
        for (int first = 0; first < blocks; first += kPanelBlocks) {
            const int count = std::min(kPanelBlocks, blocks - first);
            for (int v = 0; v < P::kVectors; v++) {
                const int from = std::min(vector + v, last_vector - 1);  // past the end: once more, and not written
                panel.unpack(v, w.data + w.group_bytes * (from / kParts), from % kParts, first, count);
            }
            Upcoming<W> upcoming(w, vector, first, blocks, tokens / P::kTokens);
            const bool whole = first + count == blocks;
            int t = 0;
            for (; t + P::kTokens <= tokens; t += P::kTokens) {
                upcoming.fetch();
                tile<P::kTokens>(t, first, count, whole);
            }
            for (; t + 2 <= tokens; t += 2) tile<2>(t, first, count, whole);
            for (; t < tokens; t++) tile<1>(t, first, count, whole);
        }
    }

    template <int rows>
    void tile(int t, int first, int count, bool whole) {
        panel.template multiply<rows>(x.from(t), first, count, sums + kRow * t);
        if (!whole) return;
        for (int i = t; i < t + rows; i++) {  // while the next tile is under way: its stores miss the caches
            for (int v = 0; v < P::kVectors && vector + v < last_vector; v++) {
                write_rows(w, out, kLanes * (vector + v), first_token + i, sums + kRow * i + kLanes * v);
            }
        }
    }
};

// `total` cut into the fewest shares of at most `most`, all but the last a multiple of `step`.
constexpr int even_share(int total, int most, int step) {
    const int shares = (total + most - 1) / most;
    return ((total + shares - 1) / shares + step - 1) / step * step;
}

template <typename W, typename Block>
void product(const Matrix& w, const uint8_t* data, int tokens, int first_group, int last_group, const Output& out) {
    const size_t stride = quantized_bytes<Block>(w.cols);
    const int chunk = even_share(tokens, kPanelTokens, Panel<W>::kTokens);
    for (int first = 0; first < tokens; first += chunk) {
        const int count = std::min(chunk, tokens - first);
        const Rows<Block> x{data + stride * first, stride};
        if (count <= kDirectTokens) {
            direct<W>(w, x, first, count, first_group, last_group, out);
        } else {
            PanelRows<W, Block> rows{w, x, out, first, count, 0, last_group * kParts, {}, {}};
            for (int v = first_group * kParts; v < last_group * kParts; v += kTileVectors) {
                rows.vector = v;
                rows.run();
            }
        }
    }
}

}  // namespace pocketllm::POCKETLLM_ISA
