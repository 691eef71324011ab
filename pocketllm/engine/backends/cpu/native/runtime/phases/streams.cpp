// Parallel residual streams: how a sublayer reads them and writes to them, each row by itself.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "runtime/phases/phases.h"

namespace pocketllm {

namespace {

constexpr int kMaxStreams = 16;

// Rows of x and of what else is read, and rows to write to.
using OnRow = void (*)(const StreamsPlan&, int hidden, const float* x, const float* other, float* out, float* more);

class StreamsPhase : public Phase {
  public:
    StreamsPhase(Rows rows, const StreamsPlan& plan, int hidden, Buffer x, Buffer other, Buffer out, Buffer more, OnRow on_row)
        : Phase(Kind::kStreams),
          rows_(rows),
          plan_(plan),
          hidden_(hidden),
          x_(x),
          other_(other),
          out_(out),
          more_(more),
          on_row_(on_row) {}

    int num_chunks(const Step& step, int threads) const override {
        return row_chunks(step.rows(rows_), int64_t(plan_.num_streams) * plan_.num_streams * hidden_, threads);
    }
    void run(const Run& run, int chunk, int num_chunks) const override {
        const int64_t rows = run.step.rows(rows_), last = begin_of(rows, chunk + 1, num_chunks);
        for (int64_t row = begin_of(rows, chunk, num_chunks); row < last; ++row) {
            on_row_(plan_, hidden_, at(x_, row), at(other_, row), at(out_, row), at(more_, row));
        }
    }

  private:
    static float* at(const Buffer& buffer, int64_t row) {
        return buffer.data ? buffer.data + row * buffer.width : nullptr;
    }

    const Rows rows_;
    const StreamsPlan plan_;
    const int hidden_;
    const Buffer x_, other_, out_, more_;
    const OnRow on_row_;
};

float sigmoid(float x) { return 1.0f / (1.0f + float(std::exp(-double(x)))); }

// Rows and columns of [to][from] divided by their sums in turn, columns last (Sinkhorn & Knopp 1967).
void make_doubly_stochastic(const StreamsPlan& plan, float* mixing) {
    const int n = plan.num_streams;
    for (int turn = 0; turn < 2 * plan.iterations; ++turn) {
        const int along = turn % 2 ? n : 1, across = turn % 2 ? 1 : n;
        for (int line = 0; line < n; ++line) {
            float* const first = mixing + line * across;
            float total = 0;
            for (int i = 0; i < n; ++i) total += first[i * along];
            for (int i = 0; i < n; ++i) first[i * along] /= total + plan.eps;
        }
    }
}

// What `w` gives each stream to be read and written with: reading [n]; shares: writing [n], mixing [n][n].
void share_out(const StreamsPlan& plan, const float* w, float* reading, float* shares) {
    const int n = plan.num_streams;
    for (int i = 0; i < n; ++i) {
        reading[i] = sigmoid(w[i] * plan.scale[0] + plan.base[i]);
        shares[i] = 2.0f * sigmoid(w[n + i] * plan.scale[1] + plan.base[n + i]);
    }
    float* const mixing = shares + n;
    for (int to = 0; to < n; ++to) {
        float* const row = mixing + to * n;
        for (int from = 0; from < n; ++from) {
            const int at = 2 * n + to * n + from;
            row[from] = std::clamp(w[at] * plan.scale[2] + plan.base[at], -plan.clamp, plan.clamp);
        }
        const float most = *std::max_element(row, row + n);
        for (int from = 0; from < n; ++from) row[from] = float(std::exp(double(row[from] - most)));
    }
    make_doubly_stochastic(plan, mixing);
}

// The same of a connection of api/compressed.py, `SoftConnection`: a softmax over each row of [from][to], then columns,
// then rows and columns in turn; stream `to` takes mixing[from][to].
void make_balanced(const StreamsPlan& plan, float* mixing) {
    const int n = plan.num_streams;
    for (int turn = 0; turn < 2 * plan.iterations; ++turn) {
        const int along = turn % 2 ? n : 1, across = turn % 2 ? 1 : n;
        for (int line = 0; line < n; ++line) {
            float* const first = mixing + line * across;
            float total = 0;
            for (int i = 0; i < n; ++i) total += first[i * along];
            for (int i = 0; i < n; ++i) first[i * along] /= turn ? total + plan.eps : total;
            for (int i = 0; i < n && !turn; ++i) first[i * along] += plan.eps;
        }
    }
}

void share_out_softly(const StreamsPlan& plan, const float* w, float* reading, float* shares) {
    const int n = plan.num_streams;
    for (int i = 0; i < n; ++i) reading[i] = sigmoid(w[i] * plan.scale[0] + plan.base[i]) + plan.eps;
    if (!plan.iterations) return;
    float mixing[kMaxStreams * kMaxStreams];
    for (int i = 0; i < n; ++i) shares[i] = 2.0f * sigmoid(w[n + i] * plan.scale[1] + plan.base[n + i]);
    for (int from = 0; from < n; ++from) {
        float* const row = mixing + from * n;
        for (int to = 0, at = 2 * n + from * n; to < n; ++to, ++at) row[to] = w[at] * plan.scale[2] + plan.base[at];
        const float most = *std::max_element(row, row + n);
        for (int to = 0; to < n; ++to) row[to] = float(std::exp(double(row[to] - most)));
    }
    make_balanced(plan, mixing);
    for (int to = 0; to < n; ++to) {
        for (int from = 0; from < n; ++from) shares[n + to * n + from] = mixing[from * n + to];
    }
}

void open_row(const StreamsPlan& plan, int hidden, const float* x, const float*, float* out, float*) {
    for (int s = 0; s < plan.num_streams; ++s) std::memcpy(out + s * hidden, x, hidden * sizeof(float));
}

void read_row(const StreamsPlan& plan, int hidden, const float* streams, const float* w, float* out, float* shares) {
    float reading[kMaxStreams];
    (plan.is_soft ? share_out_softly : share_out)(plan, w, reading, shares);
    for (int i = 0; i < hidden; ++i) out[i] = reading[0] * streams[i];
    for (int s = 1; s < plan.num_streams; ++s) {
        for (int i = 0; i < hidden; ++i) out[i] += reading[s] * streams[s * hidden + i];
    }
}

// shares in `more`
void write_row(const StreamsPlan& plan, int hidden, const float* streams, const float* y, float* out, float* shares) {
    const int n = plan.num_streams;
    const float* const mixing = shares + n;
    for (int to = 0; to < n; ++to) {
        float* const row = out + to * hidden;
        for (int i = 0; i < hidden; ++i) row[i] = shares[to] * y[i];
        for (int from = 0; from < n; ++from) {
            const float share = mixing[to * n + from];
            for (int i = 0; i < hidden; ++i) row[i] += share * streams[from * hidden + i];
        }
    }
}

void mean_row(const StreamsPlan& plan, int hidden, const float* streams, const float*, float* out, float*) {
    const int n = plan.num_streams;
    for (int i = 0; i < hidden; ++i) {
        float total = streams[i];
        for (int s = 1; s < n; ++s) total += streams[s * hidden + i];
        out[i] = total / float(n);
    }
}

// gates in `more`
void add_gated_row(const StreamsPlan& plan, int hidden, const float* streams, const float* y, float* out, float* gates) {
    for (int s = 0; s < plan.num_streams; ++s, streams += hidden, out += hidden) {
        const float share = 2.0f * sigmoid(gates[s]);
        for (int i = 0; i < hidden; ++i) out[i] = streams[i] + share * y[i];
    }
}

// value in `more`
void gate_row(const StreamsPlan& plan, int hidden, const float* keys, const float* queries, float* out, float* value) {
    for (int s = 0; s < plan.num_streams; ++s, keys += hidden, queries += hidden, out += hidden) {
        double product = 0;
        for (int i = 0; i < hidden; ++i) product += double(keys[i]) * queries[i];
        const float match = float(product / std::sqrt(double(hidden)));
        const float root = std::sqrt(std::max(std::fabs(match), 1e-6f));
        const float share = sigmoid(match > 0 ? root : match < 0 ? -root : 0.0f);
        for (int i = 0; i < hidden; ++i) out[i] = share * value[i];
    }
}

void add(Program& program, Rows rows, const StreamsPlan& plan, int hidden, Buffer x, Buffer other, Buffer out,
         Buffer more, OnRow on_row) {
    program.add(std::make_unique<StreamsPhase>(rows, plan, hidden, x, other, out, more, on_row));
}

int checked(int num_streams) {
    if (num_streams < 1 || num_streams > kMaxStreams) {
        throw Refusal(std::to_string(num_streams) + " residual streams; there may be 1 to " +
                      std::to_string(kMaxStreams));
    }
    return num_streams;
}

StreamsPlan plan_of(int num_streams) {
    StreamsPlan plan{};
    plan.num_streams = num_streams;
    return plan;
}

constexpr Buffer kNone{nullptr, 0};

}  // namespace

void add_open_streams(Program& program, Buffer x, int num_streams, float* out) {
    const int n = checked(num_streams);
    add(program, Rows::kTokens, plan_of(n), x.width, x, kNone, {out, x.width * n}, kNone, open_row);
}

void add_read_streams(Program& program, Rows rows, Buffer streams, const float* logits, const StreamsPlan& plan, float* out,
                      float* shares) {
    const int n = checked(plan.num_streams), hidden = streams.width / n;
    const bool only_reads = plan.is_soft && !plan.iterations;
    const Buffer w{const_cast<float*>(logits), only_reads ? n : 2 * n + n * n};
    add(program, rows, plan, hidden, streams, w, {out, hidden}, {shares, only_reads ? 0 : n + n * n}, read_row);
}

void add_write_streams(Program& program, Buffer streams, const float* shares, Buffer y, float* out) {
    const int n = checked(streams.width / y.width);
    const Buffer kept{const_cast<float*>(shares), n + n * n};
    add(program, Rows::kTokens, plan_of(n), y.width, streams, y, {out, streams.width}, kept, write_row);
}

void add_gated_streams(Program& program, Buffer streams, const float* gates, Buffer y, float* out) {
    const int n = checked(streams.width / y.width);
    add(program, Rows::kTokens, plan_of(n), y.width, streams, y, {out, streams.width}, {const_cast<float*>(gates), n}, add_gated_row);
}

void add_gate_streams(Program& program, Buffer keys, const float* queries, Buffer value, float* out) {
    const int n = checked(keys.width / value.width);
    const Buffer q{const_cast<float*>(queries), keys.width};
    add(program, Rows::kTokens, plan_of(n), value.width, keys, q, {out, keys.width}, value, gate_row);
}

void add_mean_streams(Program& program, Rows rows, Buffer streams, int num_streams, float* out) {
    const int n = checked(num_streams), hidden = streams.width / n;
    add(program, rows, plan_of(n), hidden, streams, kNone, {out, hidden}, kNone, mean_row);
}

}  // namespace pocketllm
