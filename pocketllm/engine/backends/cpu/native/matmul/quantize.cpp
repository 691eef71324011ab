#include <cmath>
#include <limits>

#include "elementwise/floats.h"
#include "matmul/activations.h"

namespace pocketllm::POCKETLLM_ISA {

namespace {

struct Ints {
    NativeInts part[kParts];
};

// Sums in 16 lanes and adds those up in pairs: one order whatever the width of a vector.
float sum_of_squares(const float* x, int cols) {
    Floats squares = all(0.0f);
    int col = 0;
    for (; col + kLanes <= cols; col += kLanes) squares = squares + load(x + col) * load(x + col);
    if (col < cols) {
        float rest[kLanes] = {};
        std::memcpy(rest, x + col, (cols - col) * sizeof(float));
        squares = squares + load(rest) * load(rest);
    }
    return sum(squares);
}

template <int apart>
inline NativeInts swapped_ints(NativeInts v) {
    return (NativeInts)swapped<apart>((NativeFloats)v);
}

// All lanes in one by an operation whose order does not matter.
template <class Function>
inline int32_t fold_ints(const Ints& a, Function function) {
    NativeInts v = a.part[0];
    for (int i = 1; i < kParts; ++i) v = function(v, a.part[i]);
    if constexpr (kNative > 8) v = function(v, swapped_ints<8>(v));
    if constexpr (kNative > 4) v = function(v, swapped_ints<4>(v));
    v = function(v, swapped_ints<2>(v));
    return function(v, swapped_ints<1>(v))[0];
}

struct Range {
    float least, largest;
};

// A float's bits in the order of the values, with NaN beyond both ends: it becomes one of them. Its own inverse.
inline int32_t ordered(int32_t bits) { return bits ^ (bits >> 31 & 0x7fffffff); }
inline NativeInts ordered(NativeInts bits) { return bits ^ (bits >> 31 & 0x7fffffff); }

Range range_of(const Floats& first, const Floats& second) {
    Ints least, largest;
    for (int i = 0; i < kParts; ++i) {
        const NativeInts one = ordered((NativeInts)first.part[i]), other = ordered((NativeInts)second.part[i]);
        least.part[i] = one < other ? one : other;
        largest.part[i] = one > other ? one : other;
    }
    const int32_t low = ordered(fold_ints(least, [](NativeInts a, NativeInts b) { return a < b ? a : b; }));
    const int32_t high = ordered(fold_ints(largest, [](NativeInts a, NativeInts b) { return a > b ? a : b; }));
    return {bits_as_float(uint32_t(low)), bits_as_float(uint32_t(high))};
}

// (x - middle) · scale to the nearest integer, ties to even; less than 2^22: the sum's last bit is worth one.
inline Ints nearest(const Floats& x, float middle, float scale) {
    constexpr float kMagic = 12582912.0f;  // 1.5 · 2^23
    const Floats sum = (x - all(middle)) * all(scale) + all(kMagic);
    Ints out;
    for (int i = 0; i < kParts; ++i) out.part[i] = (NativeInts)sum.part[i] - 0x4B400000;
    return out;
}

inline void store_bytes(const Ints& x, int8_t* to) {
#if defined(__AVX512F__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8((__m512i)x.part[0]));
#else
    int32_t lanes[kLanes];
    std::memcpy(lanes, &x, sizeof lanes);
    for (int i = 0; i < kLanes; ++i) to[i] = static_cast<int8_t>(lanes[i]);
#endif
}

// Sixteen q into half a block's planes.
void store_planes(const Ints& q, int half, Int8Block& out) { store_bytes(q, out.planes[0] + 16 * half); }

void store_planes(const Ints& q, int half, Int16Block& out) {
    Floats values;
    for (int i = 0; i < kParts; ++i) values.part[i] = __builtin_convertvector(q.part[i], NativeFloats);
    const Ints high = nearest(values, 0.0f, 1.0f / 255);  // never halfway between two: 255 is odd
    Ints low;
    for (int i = 0; i < kParts; ++i) low.part[i] = q.part[i] - 255 * high.part[i];
    store_bytes(high, out.planes[0] + 16 * half);
    store_bytes(low, out.planes[1] + 16 * half);
}

constexpr float kSmallest = 1e-30f;  // a block that spans less is its middle: 32512 / x would leave the range of floats

// Sixteen values each.
template <typename Block>
void quantize_block(const Floats& first, const Floats& second, Block& block) {
    BlockScales& out = block.scales;
    const Range range = range_of(first, second);
    const float middle = 0.5f * range.least + 0.5f * range.largest;  // no sum of finite values overflows so
    // the middle may be rounded: of the two distances the larger, so that q stays within its range
    const float above = range.largest - middle, below = middle - range.least;
    const float reach = above > below ? above : below;
    const float scale = reach > kSmallest ? Block::kLargest / reach : 0.0f;
    // what is no number is told of by d and z; q, which would be anything and overflow its sums, is then 0
    const int32_t kept = reach < std::numeric_limits<float>::infinity() ? -1 : 0;
    int32_t sums[2];
    for (int half = 0; half < 2; half++) {
        Ints q = nearest(half ? second : first, middle, scale);
        for (NativeInts& part : q.part) part &= kept;
        store_planes(q, half, block);
        sums[half] = fold_ints(q, [](NativeInts a, NativeInts b) { return a + b; });
    }
    out.d = reach / Block::kLargest;
    out.z = middle;
    out.minus_sum = -(sums[0] + sums[1]);
    out.sum = static_cast<float>(sums[0] + sums[1]);
    for (int half = 0; half < 2; half++) {
        out.minus_sum_16[half] = -sums[half];
        out.sum_16[half] = static_cast<float>(sums[half]);
    }
}

// Sixteen values of a row from `col` on, normed; zeros past its end.
inline Floats values_at(const float* row, int cols, int col, const float* norm, float scale) {
    if (col + kLanes <= cols) {
        const Floats values = load(row + col);
        return norm ? values * all(scale) * load(norm + col) : values;
    }
    float values[kLanes] = {};
    for (int i = 0; col + i < cols; i++) values[i] = norm ? row[col + i] * scale * norm[col + i] : row[col + i];
    return load(values);
}

}  // namespace

template <typename Block>
void quantize(const float* x, int64_t ld, int cols, int first, int last, const float* norm, float eps, uint8_t* out) {
    const int blocks = activation_blocks(cols);
    for (int token = first; token < last; token++) {
        const float* row = x + ld * token;
        auto* to = reinterpret_cast<Block*>(out + quantized_bytes<Block>(cols) * token);
        const float scale = norm ? 1.0f / std::sqrt(sum_of_squares(row, cols) / static_cast<float>(cols) + eps) : 1.0f;
        for (int b = 0; b < blocks; b++) {
            const int col = 32 * b;
            quantize_block(values_at(row, cols, col, norm, scale), values_at(row, cols, col + 16, norm, scale), to[b]);
        }
    }
}

template void quantize<Int8Block>(const float*, int64_t, int, int, int, const float*, float, uint8_t*);
template void quantize<Int16Block>(const float*, int64_t, int, int, int, const float*, float, uint8_t*);

}  // namespace pocketllm::POCKETLLM_ISA
