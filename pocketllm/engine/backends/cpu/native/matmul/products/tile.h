// The inner product: 32 columns of some rows of a matrix with some rows of activations.
//
//   Σ w · (d · q + z) = d · Σ w q + z · Σ w
//
// and of two planes Σ w q = 255 · Σ w high + Σ w low. Sums of integers are exact, and a row's floats are added up block
// after block: its bits do not depend on how many rows a tile has, nor on where its codes come from.
#pragma once

#include "matmul/activations.h"
#include "matmul/weights/weights.h"

namespace pocketllm::POCKETLLM_ISA {

// The rows of activations that a tile meets, one after another.
template <typename B>
struct Rows {
    using Block = B;
    const uint8_t* data;
    size_t stride;
    Rows from(int row) const { return {data + stride * row, stride}; }
    const Block& at(int row, int block) const { return reinterpret_cast<const Block*>(data + stride * row)[block]; }
};

// `tokens` rows of which the last is repeated where there are fewer.
template <typename B, int tokens>
struct FilledRows {
    using Block = B;
    const Block* rows[tokens];
    FilledRows(const Rows<Block>& x, int count) {
        for (int t = 0; t < tokens; t++) rows[t] = &x.at(t < count ? t : count - 1, 0);
    }
    const Block& at(int row, int block) const { return rows[row][block]; }
};

constexpr int log2_of(int power) { return power <= 1 ? 0 : 1 + log2_of(power / 2); }

template <typename W>
inline int32_t minus_sum_of(const BlockScales& x, int scale) {
    return W::kScaleCols == 32 ? x.minus_sum : x.minus_sum_16[scale];
}

template <typename W>
inline float sum_of(const BlockScales& x, int scale) {
    return W::kScaleCols == 32 ? x.sum : x.sum_16[scale];
}

// What the codes' offset adds to a sum, to be taken away: it is where the sum begins.
template <typename W>
inline Ints first_sum(int32_t minus_sum) {
    if (W::kOffset == 0) return zero_ints();
    return shift_left_by<log2_of(W::kOffset)>(all_ints(minus_sum));
}

// sums[v][t] += Σ code · plane over steps [first, last). Rows of activations lie inside: no sum waits for another.
template <typename W, int first, int last, int plane, int vectors, int tokens, typename Codes, typename X>
inline void add_steps(Ints (&sums)[vectors][tokens], const Codes& codes, const X& x, int block) {
    constexpr int kRun = run_steps(W::kLargest) < last - first ? run_steps(W::kLargest) : last - first;
    POCKETLLM_UNROLL for (int step = first; step < last; step += kRun) {
        Bytes w[vectors][kRun];
        POCKETLLM_UNROLL for (int v = 0; v < vectors; v++) {
            POCKETLLM_UNROLL for (int i = 0; i < kRun; i++) w[v][i] = codes(v, step + i);
        }
        POCKETLLM_UNROLL for (int t = 0; t < tokens; t++) {
            const int8_t* q = x.at(t, block).planes[plane] + 4 * step;
            POCKETLLM_UNROLL for (int v = 0; v < vectors; v++) sums[v][t] = add_run<W::kWide>(sums[v][t], w[v], q);
        }
    }
}

// Σ code · q of a block's steps [first, last), less what the codes' offset adds.
template <typename W, int s, int first, int last, int vectors, int tokens, typename Codes, typename X>
inline void add_up(Ints (&sums)[vectors][tokens], const Codes& codes, const X& x, int block) {
    constexpr bool kHasTwo = X::Block::kPlanes == 2;
    if constexpr (kHasTwo) {
        POCKETLLM_UNROLL for (int t = 0; t < tokens; t++) {
            POCKETLLM_UNROLL for (int v = 0; v < vectors; v++) sums[v][t] = zero_ints();
        }
        add_steps<W, first, last, 0>(sums, codes, x, block);
    }
    POCKETLLM_UNROLL for (int t = 0; t < tokens; t++) {
        const Ints begin = first_sum<W>(minus_sum_of<W>(x.at(t, block).scales, s));
        POCKETLLM_UNROLL for (int v = 0; v < vectors; v++) {
            if constexpr (kHasTwo) {
                sums[v][t] = add_ints(sub_ints(shift_left_by<8>(sums[v][t]), sums[v][t]), begin);
            } else {
                sums[v][t] = begin;
            }
        }
    }
    add_steps<W, first, last, X::Block::kPlanes - 1>(sums, codes, x, block);
}

// The product with the columns of the block's scale number `s`, steps [first, last), added to those before it.
template <typename W, int s, int first, int last, int vectors, int tokens, typename Codes, typename ScalesOf,
          typename X>
inline void add_scaled(Floats (&products)[vectors][tokens], const Codes& codes, const ScalesOf& scales_of, const X& x,
                       int block) {
    Ints sums[vectors][tokens];
    add_up<W, s, first, last>(sums, codes, x, block);
    POCKETLLM_UNROLL for (int v = 0; v < vectors; v++) {
        const Scales scales = scales_of(v);
        POCKETLLM_UNROLL for (int t = 0; t < tokens; t++) {
            const Floats sum = to_floats(sums[v][t]);
            Floats product = s == 0 ? mul(scales.d[s], sum) : fma(scales.d[s], sum, products[v][t]);
            if (W::kMin) product = fma(scales.m[s], all(sum_of<W>(x.at(t, block).scales, s)), product);
            products[v][t] = product;
        }
    }
}

// acc[v][t] += the product of `vectors` vectors of rows and `tokens` rows of activations over one block.
// codes(v, step), scales_of(v): of vector v; x: Rows or FilledRows
template <typename W, int vectors, int tokens, typename Codes, typename ScalesOf, typename X>
inline void add_block(Floats (&acc)[vectors][tokens], const Codes& codes, const ScalesOf& scales_of, const X& x,
                      int block) {
    Floats products[vectors][tokens];
    if constexpr (W::kScaleCols == 32) {
        add_scaled<W, 0, 0, 8>(products, codes, scales_of, x, block);
    } else {
        add_scaled<W, 0, 0, 4>(products, codes, scales_of, x, block);
        add_scaled<W, 1, 4, 8>(products, codes, scales_of, x, block);
    }
    POCKETLLM_UNROLL for (int t = 0; t < tokens; t++) {
        const Floats d = all(x.at(t, block).scales.d), z = all(x.at(t, block).scales.z);
        POCKETLLM_UNROLL for (int v = 0; v < vectors; v++) {
            acc[v][t] = fma(scales_of(v).total, z, fma(products[v][t], d, acc[v][t]));
        }
    }
}

}  // namespace pocketllm::POCKETLLM_ISA
