// What happens to rows of floats between two matrices.
#include "elementwise/floats.h"
#include "elementwise/rows.h"

namespace pocketllm::POCKETLLM_ISA {

namespace {

// The last values of a row go through the same lanes as all others, so that their bits do not depend on where they
// stand.
template <class Function>
inline void each(const float* x, const float* y, int64_t n, float* out, Function function) {
    int64_t at = 0;
    for (; at + kLanes <= n; at += kLanes) store(out + at, function(load(x + at), load(y + at)));
    if (at == n) return;
    float one[kLanes] = {}, other[kLanes] = {};
    std::memcpy(one, x + at, (n - at) * sizeof(float));
    std::memcpy(other, y + at, (n - at) * sizeof(float));
    store(one, function(load(one), load(other)));
    std::memcpy(out + at, one, (n - at) * sizeof(float));
}

}  // namespace

void rms_norm(const float* x, int64_t runs, int width, const float* weight, float eps, float* out) {
    for (int64_t run = 0; run < runs; ++run, x += width, out += width) {
        Floats squares = all(0.0f);
        int at = 0;
        for (; at + kLanes <= width; at += kLanes) {
            const Floats part = load(x + at);
            squares = fma(part, part, squares);
        }
        if (at < width) {
            float rest[kLanes] = {};
            std::memcpy(rest, x + at, (width - at) * sizeof(float));
            squares = fma(load(rest), load(rest), squares);
        }
        const Floats by = all(1.0f / std::sqrt(sum(squares) / float(width) + eps));
        each(x, weight, width, out, [&](const Floats& a, const Floats& w) { return a * by * w; });
    }
}

void add(const float* x, const float* y, int64_t n, float* out) {
    each(x, y, n, out, [](const Floats& a, const Floats& b) { return a + b; });
}

void scale(const float* x, float by, int64_t n, float* out) {
    each(x, x, n, out, [by](const Floats& a, const Floats&) { return a * all(by); });
}

void silu_mul(const float* gate, const float* up, int64_t n, float* out) {
    each(gate, up, n, out, [](const Floats& a, const Floats& b) { return silu(a) * b; });
}

void gelu_mul(const float* gate, const float* up, int64_t n, float* out) {
    each(gate, up, n, out, [](const Floats& a, const Floats& b) { return gelu(a) * b; });
}

void rope(const float* x, int heads, int head_dim, const float* cos, const float* sin, int pairs, bool half_split,
          float* out) {
    const int step = half_split ? 1 : 2, apart = half_split ? pairs : 1;
    for (int head = 0; head < heads; ++head, x += head_dim, out += head_dim) {
        for (int pair = 0; pair < pairs; ++pair) {
            const int at = pair * step;
            const float first = x[at], second = x[at + apart];
            out[at] = first * cos[pair] - second * sin[pair];
            out[at + apart] = second * cos[pair] + first * sin[pair];
        }
        if (out != x) std::memcpy(out + 2 * pairs, x + 2 * pairs, (head_dim - 2 * pairs) * sizeof(float));
    }
}

}  // namespace pocketllm::POCKETLLM_ISA
