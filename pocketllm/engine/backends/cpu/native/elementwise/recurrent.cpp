// Recurrent layers: a causal convolution and the gated delta rule, each over the tokens of one sequence in order.
//
// A column of a state is computed by itself, so that it does not matter how columns are shared out among threads, nor
// how a prompt was cut: a state between two steps is the one that the next token would have found.
#include "elementwise/recurrent.h"

#include <algorithm>

#include "elementwise/floats.h"

namespace pocketllm::POCKETLLM_ISA {

namespace {

// The first `count` of sixteen values, zeros behind them.
inline Floats load_first(const float* from, int count) {
    if (count >= kLanes) return load(from);
    float lanes[kLanes] = {};
    std::memcpy(lanes, from, count * sizeof(float));
    return load(lanes);
}

inline void store_first(float* to, const Floats& value, int count) {
    if (count >= kLanes) return store(to, value);
    std::memcpy(to, &value, count * sizeof(float));
}

// -- the delta rule ---------------------------------------------------------------------------------------------------
// One token's query and key of length one, the query divided by √dim as well, and their product.
struct Unit {
    float *q, *k;
    float product;
};

inline void scale_by(const float* from, int dim, float by, float* to) {
    for (int i = 0; i < dim; i += kLanes) store(to + i, load_first(from + i, dim - i) * all(by));
}

inline float dot(const float* a, const float* b, int dim) {
    Floats total = all(0.0f);
    for (int i = 0; i < dim; i += kLanes) total = fma(load_first(a + i, dim - i), load_first(b + i, dim - i), total);
    return sum(total);
}

void normalize(const DeltaRows& rows, int token, Unit& unit) {
    const int dim = rows.key_dim;
    const float *q = rows.q + token * rows.ld, *k = rows.k + token * rows.ld;
    scale_by(q, dim, 1.0f / std::sqrt(dot(q, q, dim) + rows.eps) / std::sqrt(float(dim)), unit.q);
    scale_by(k, dim, 1.0f / std::sqrt(dot(k, k, dim) + rows.eps), unit.k);
    unit.product = dot(unit.q, unit.k, dim);
}

// V vectors of columns from `column` on, the last `count` values wide. What a token adds to the state is added when the
// next one passes over it: S ← decay · (S + k ⊗ e) of the token before.
template <int V>
void delta_columns(const DeltaRows& rows, int column, int count, Unit unit, float* k_before) {
    float* const state = rows.state + column;
    Floats e[V];
    for (int v = 0; v < V; ++v) e[v] = all(0.0f);
    std::memset(k_before, 0, sizeof(float) * rows.key_dim);
    for (int token = 0; token < rows.tokens; ++token) {
        normalize(rows, token, unit);
        const Floats decay = all(rows.gates[2 * token * rows.ld_gates]);
        const Floats weight = all(rows.gates[2 * token * rows.ld_gates + 1]);
        const float* const decays = rows.decays ? rows.decays + token * rows.ld : nullptr;
        Floats seen[V], out[V];
        for (int v = 0; v < V; ++v) seen[v] = out[v] = all(0.0f);
        for (int i = 0; i < rows.key_dim; ++i) {
            float* const row = state + int64_t(i) * rows.value_dim;
            const Floats before = all(k_before[i]), k = all(unit.k[i]), q = all(unit.q[i]);
            const Floats by = decays ? all(decays[i]) : decay;
            for (int v = 0; v < V; ++v) {
                const Floats s = by * fma(before, e[v], load_first(row + kLanes * v, count));
                store_first(row + kLanes * v, s, count);
                seen[v] = fma(s, k, seen[v]);
                out[v] = fma(s, q, out[v]);
            }
        }
        for (int v = 0; v < V; ++v) {
            const int at = column + kLanes * v;
            e[v] = (load_first(rows.v + token * rows.ld + at, count) - seen[v]) * weight;
            store_first(rows.out + token * rows.ld_out + at, fma(all(unit.product), e[v], out[v]), count);
        }
        std::swap(unit.k, k_before);
    }
    for (int i = 0; i < rows.key_dim; ++i) {
        for (int v = 0; v < V; ++v) {
            float* const at = state + int64_t(i) * rows.value_dim + kLanes * v;
            store_first(at, fma(all(k_before[i]), e[v], load_first(at, count)), count);
        }
    }
}

}  // namespace

void gated_delta(const DeltaRows& rows, float* scratch) {
    constexpr int kVectors = kNative == 16 ? 4 : 1;
    const int width = padded_lanes(rows.key_dim);
    const Unit unit{scratch, scratch + width, 0.0f};
    float* const before = scratch + 2 * width;
    if (rows.begins) {
        for (int i = 0; i < rows.key_dim; ++i) {
            float* const row = rows.state + int64_t(i) * rows.value_dim;
            std::fill(row + rows.first, row + rows.last, 0.0f);
        }
    }
    int column = rows.first;
    for (; column + kVectors * kLanes <= rows.last; column += kVectors * kLanes) {
        delta_columns<kVectors>(rows, column, kLanes, unit, before);
    }
    for (; column < rows.last; column += kLanes) delta_columns<1>(rows, column, rows.last - column, unit, before);
}

// -- the convolution --------------------------------------------------------------------------------------------------
void causal_conv(const ConvRows& rows) {
    const int before = (rows.taps - 1) * rows.dilation;
    for (int channel = rows.first; channel < rows.last; channel += kLanes) {
        const int count = rows.last - channel;
        // row -before … -1 are the state's, those from 0 on this step's
        const auto row_at = [&](int row) {
            if (row >= 0) return load_first(rows.x + row * rows.channels + channel, count);
            return rows.begins ? all(0.0f) : load_first(rows.state + (row + before) * rows.channels + channel, count);
        };
        for (int token = 0; token < rows.tokens; ++token) {
            Floats total = all(0.0f);
            for (int tap = 0; tap < rows.taps; ++tap) {
                const Floats weights = load_first(rows.kernel + tap * rows.channels + channel, count);
                total = fma(row_at(token - before + tap * rows.dilation), weights, total);
            }
            store_first(rows.out + token * rows.channels + channel, rows.silu ? silu(total) : total, count);
        }
        for (int kept = 0; kept < before; ++kept) {  // a row comes from one that is later or of this step
            store_first(rows.state + kept * rows.channels + channel, row_at(rows.tokens - before + kept), count);
        }
    }
}

}  // namespace pocketllm::POCKETLLM_ISA
