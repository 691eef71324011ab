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

void layer_norm(const float* x, int64_t runs, int width, const float* weight, const float* bias, float eps, float* out) {
    const auto total_of = [width](const float* from, auto function) {
        Floats total = all(0.0f);
        for (int at = 0; at < width; at += kLanes) {
            float rest[kLanes] = {};
            const int count = width - at < kLanes ? width - at : kLanes;
            std::memcpy(rest, from + at, count * sizeof(float));
            total = total + keep(function(load(rest)), 0, count, 0.0f);
        }
        return sum(total);
    };
    for (int64_t run = 0; run < runs; ++run, x += width, out += width) {
        const float mean = total_of(x, [](const Floats& a) { return a; }) / float(width);
        const float variance = total_of(x, [mean](const Floats& a) { return (a - all(mean)) * (a - all(mean)); });
        const Floats by = all(1.0f / std::sqrt(variance / float(width) + eps));
        each(x, weight, width, out, [&](const Floats& a, const Floats& w) { return (a - all(mean)) * by * w; });
        add(out, bias, width, out);
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

void bounded_mul(const float* gate, const float* up, int64_t n, float slope, float limit, float* out) {
    each(gate, up, n, out, [=](const Floats& a, const Floats& b) {
        const Floats g = smaller(a, all(limit)), u = smaller(larger(b, all(-limit)), all(limit));
        return g / (all(1.0f) + exp(g * all(-slope))) * (u + all(1.0f));
    });
}

void limited_mul(const float* gate, const float* up, int64_t n, float limit, float* out) {
    each(gate, up, n, out, [=](const Floats& a, const Floats& b) {
        return silu(smaller(a, all(limit))) * smaller(larger(b, all(-limit)), all(limit));
    });
}

void sigmoid_mul(const float* gate, const float* x, int64_t n, float* out) {
    each(gate, x, n, out, [](const Floats& a, const Floats& b) { return b / (all(1.0f) + exp(all(0.0f) - a)); });
}

void mul(const float* x, const float* y, int64_t n, float* out) {
    each(x, y, n, out, [](const Floats& a, const Floats& b) { return a * b; });
}

void hadamard(const float* x, const float* signs, int64_t n, int block, bool inverse, float* out) {
    for (int64_t i = 0; i < n; ++i) out[i] = inverse ? x[i] : x[i] * signs[i];
    for (int half = block / 2; half > 0; half /= 2) {
        for (float* run = out; run < out + n; run += 2 * half) {
            for (int i = 0; i < half; ++i) {
                const float one = run[i], other = run[half + i];
                run[i] = one + other;
                run[half + i] = one - other;
            }
        }
    }
    const float by = 1.0f / std::sqrt(float(block));
    for (int64_t i = 0; i < n; ++i) out[i] = inverse ? out[i] * by * signs[i] : out[i] * by;
}

void rope(const float* x, int heads, const Rotation& how, const float* cos, const float* sin, float* out) {
    const int step = how.half_split ? 1 : 2, apart = how.half_split ? how.pairs : 1;
    const int end = how.first + 2 * how.pairs;
    const float turn = how.inverse ? -1.0f : 1.0f;
    for (int head = 0; head < heads; ++head, x += how.head_dim, out += how.head_dim) {
        for (int pair = 0; pair < how.pairs; ++pair) {
            const int at = how.first + pair * step;
            const float first = x[at], second = x[at + apart], s = turn * sin[pair];
            out[at] = first * cos[pair] - second * s;
            out[at + apart] = second * cos[pair] + first * s;
        }
        if (out == x) continue;
        std::memcpy(out, x, how.first * sizeof(float));
        std::memcpy(out + end, x + end, (how.head_dim - end) * sizeof(float));
    }
}

}  // namespace pocketllm::POCKETLLM_ISA
