// The inner product: 32 columns of one part's rows with several rows of activations.
//
// Sums of integers are exact, and a row's floats are added up block after block: its bits do not depend on how many rows
// a tile has, nor on where its codes come from.
#pragma once

#include "matmul/activations.h"
#include "matmul/weights/weights.h"

namespace pocketllm::POCKETLLM_ISA {

constexpr int shift_of(int offset) { return offset <= 1 ? 0 : 1 + shift_of(offset / 2); }

// What the codes' offset adds to a sum, to be taken away: it is where the sum begins.
template <int offset>
inline Ints first_sum(const int32_t* minus_sum) {
    if (offset == 0) return zero_ints();
    return shift_left_by<shift_of(offset)>(all_ints(*minus_sum));
}

// Σ code · q over steps [first, last), two chains where there is no other row to overlap with.
template <typename W, int first, int last, bool two_chains>
inline Ints dot_steps(Ints sum, const Bytes (&w)[kSteps], const int8_t* q) {
    if (two_chains) {
        Ints other = zero_ints();
        for (int s = first; s < last; s += 2) {
            sum = dot4<W::kWide>(sum, w[s], q + 4 * s);
            other = dot4<W::kWide>(other, w[s + 1], q + 4 * s + 4);
        }
        return add_ints(sum, other);
    }
    for (int s = first; s < last; s++) sum = dot4<W::kWide>(sum, w[s], q + 4 * s);
    return sum;
}

// acc + the product with one row's block.
template <typename W, bool two_chains>
inline Floats add_block(Floats acc, const Bytes (&w)[kSteps], const Scales& scales, const ActivationBlock& x) {
    Floats sum;
    if constexpr (W::kScaleCols == 32) {
        const Ints dot = dot_steps<W, 0, 8, two_chains>(first_sum<W::kOffset>(&x.minus_sum), w, x.q);
        sum = mul(scales.d[0], to_floats(dot));
        if constexpr (W::kMin) sum = fnma(scales.m[0], to_floats(all_ints(x.minus_sum)), sum);
    } else {
        const Ints dot0 = dot_steps<W, 0, 4, false>(first_sum<W::kOffset>(&x.minus_sum_16[0]), w, x.q);
        const Ints dot1 = dot_steps<W, 4, 8, false>(first_sum<W::kOffset>(&x.minus_sum_16[1]), w, x.q);
        sum = fma(scales.d[1], to_floats(dot1), mul(scales.d[0], to_floats(dot0)));
        if constexpr (W::kMin) {
            sum = fnma(scales.m[0], to_floats(all_ints(x.minus_sum_16[0])), sum);
            sum = fnma(scales.m[1], to_floats(all_ints(x.minus_sum_16[1])), sum);
        }
    }
    return fma(sum, all(x.d), acc);
}

// Rows of activations, one after another.
struct Rows {
    const uint8_t* data;
    size_t stride;
    const ActivationBlock& at(int row, int block) const {
        return reinterpret_cast<const ActivationBlock*>(data + stride * row)[block];
    }
};

}  // namespace pocketllm::POCKETLLM_ISA
