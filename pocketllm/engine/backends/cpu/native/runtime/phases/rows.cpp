// Phases that work on each row by itself.
#include <cmath>
#include <cstring>
#include <string>

#include "runtime/phases/sequences.h"

namespace pocketllm {

namespace {

// A phase that is a function of a range of rows.
template <class Function>
class RowPhase : public Phase {
  public:
    RowPhase(Kind kind, Rows rows, int64_t work, Function function)
        : Phase(kind), rows_(rows), work_(work), function_(function) {}

    int num_chunks(const Step& step, int threads) const override {
        return row_chunks(step.rows(rows_), work_, threads);
    }

    void run(const Run& run, int chunk, int num_chunks) const override {
        const int64_t rows = run.step.rows(rows_);
        function_(run, begin_of(rows, chunk, num_chunks), begin_of(rows, chunk + 1, num_chunks));
    }

  private:
    const Rows rows_;
    const int64_t work_;  // floats of a row
    const Function function_;
};

template <class Function>
void add_rows(Program& program, Kind kind, Rows rows, int64_t work, Function function) {
    program.add(std::make_unique<RowPhase<Function>>(kind, rows, work, function));
}

void lower(int64_t& limit, int64_t to) {
    if (to < limit) limit = to;
}

}  // namespace

void add_embed(Program& program, const Matrix& table, float scale, Buffer out) {
    lower(program.limits.input_ids, table.rows);
    add_rows(program, Kind::kEmbed, Rows::kTokens, out.width, [=, &table](const Run& run, int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) {
            float* to = out.data + row * out.width;
            run.kernels.decode_row(table, run.step.input_ids[row], to);
            if (scale != 1.0f) run.kernels.scale(to, scale, out.width, to);
        }
    });
}

void add_rms_norm(Program& program, Rows rows, Buffer x, const float* weight, int weight_width, float eps, float* out) {
    const int64_t runs = x.width / weight_width;
    add_rows(program, Kind::kNorm, rows, x.width, [=](const Run& run, int64_t first, int64_t last) {
        const int64_t at = first * x.width;
        run.kernels.rms_norm(x.data + at, (last - first) * runs, weight_width, weight, eps, out + at);
    });
}

void add_layer_norm(Program& program, Rows rows, Buffer x, const float* weight, const float* bias, float eps,
                    float* out) {
    add_rows(program, Kind::kNorm, rows, 2 * int64_t(x.width), [=](const Run& run, int64_t first, int64_t last) {
        const int64_t at = first * x.width;
        run.kernels.layer_norm(x.data + at, last - first, x.width, weight, bias, eps, out + at);
    });
}

void add_scale(Program& program, Rows rows, Buffer x, float by, float* out) {
    add_rows(program, Kind::kElementwise, rows, x.width, [=](const Run& run, int64_t first, int64_t last) {
        const int64_t at = first * x.width;
        run.kernels.scale(x.data + at, by, (last - first) * x.width, out + at);
    });
}

void add_angles(Program& program, const float* inv_freq, int pairs, float magnitude, float* out) {
    constexpr int kWorkOfOne = 64;  // a cosine and a sine in float64, in floats that are merely copied
    add_rows(program, Kind::kAngles, Rows::kTokens, int64_t(pairs) * kWorkOfOne,
             [=](const Run& run, int64_t first, int64_t last) {
                 for (int64_t row = first; row < last; ++row) {
                     angles_at(run.step.positions[row], inv_freq, pairs, magnitude, out + row * 2 * pairs);
                 }
             });
}

void add_rope(Program& program, Buffer x, const float* angles, const Rotation& how, float* out) {
    const int heads = x.width / how.head_dim, pairs = how.pairs;
    if (how.first < 0 || how.first + 2 * pairs > how.head_dim) {
        throw Refusal(std::to_string(2 * pairs) + " values cannot turn in heads of " + std::to_string(how.head_dim));
    }
    add_rows(program, Kind::kRope, Rows::kTokens, x.width, [=](const Run& run, int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) {
            const float* turn = angles + row * 2 * pairs;
            run.kernels.rope(x.data + row * x.width, heads, how, turn, turn + pairs, out + row * x.width);
        }
    });
}

void add_elementwise(Program& program, Elementwise what, Rows rows, Buffer x, const float* y, float* out) {
    const bool is_plain = what == Elementwise::kAdd || what == Elementwise::kMul;
    const int64_t work = is_plain ? x.width : 4 * int64_t(x.width);
    add_rows(program, Kind::kElementwise, rows, work, [=](const Run& run, int64_t first, int64_t last) {
        const auto function = what == Elementwise::kAdd          ? run.kernels.add
                              : what == Elementwise::kSiluMul    ? run.kernels.silu_mul
                              : what == Elementwise::kGeluMul    ? run.kernels.gelu_mul
                              : what == Elementwise::kSigmoidMul ? run.kernels.sigmoid_mul
                                                                 : run.kernels.mul;
        const int64_t at = first * x.width, end = last * x.width;
        function(x.data + at, y + at, end - at, out + at);
    });
}

void add_limited_mul(Program& program, Rows rows, Buffer gate, const float* up, float limit, float* out) {
    add_rows(program, Kind::kElementwise, rows, 4 * int64_t(gate.width), [=](const Run& run, int64_t row, int64_t last) {
        const int64_t at = row * gate.width, end = last * gate.width;
        run.kernels.limited_mul(gate.data + at, up + at, end - at, limit, out + at);
    });
}

void add_mul_each(Program& program, Rows rows, Buffer x, const float* by, float* out) {
    add_rows(program, Kind::kElementwise, rows, x.width, [=](const Run& run, int64_t row, int64_t last) {
        for (; row < last; ++row) run.kernels.mul(x.data + row * x.width, by, x.width, out + row * x.width);
    });
}

void add_take(Program& program, Buffer x, float* out) {
    add_rows(program, Kind::kTake, Rows::kLogitRows, x.width, [=](const Run& run, int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) {
            std::memcpy(out + row * x.width, x.data + run.step.logit_rows[row] * int64_t(x.width),
                        x.width * sizeof(float));
        }
    });
}

void add_columns(Program& program, Rows rows, Buffer x, int first, int count, float* out) {
    if (first < 0 || count < 1 || first + count > x.width) {
        throw Refusal("columns " + std::to_string(first) + " to " + std::to_string(first + count) + " of rows of " +
                      std::to_string(x.width));
    }
    add_rows(program, Kind::kTake, rows, count, [=](const Run&, int64_t row, int64_t last) {
        for (; row < last; ++row) {
            std::memcpy(out + row * count, x.data + row * x.width + first, count * sizeof(float));
        }
    });
}

void add_gate_rows(Program& program, Buffer x, const float* gate, float* out) {
    add_rows(program, Kind::kElementwise, Rows::kTokens, x.width, [=](const Run& run, int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) {
            const float share = float(1.0 / (1.0 + std::exp(-double(gate[row]))));
            run.kernels.scale(x.data + row * x.width, share, x.width, out + row * x.width);
        }
    });
}

void add_hadamard(Program& program, Rows rows, Buffer x, const float* signs, int block, bool inverse, float* out) {
    if (block < 1 || (block & (block - 1)) || x.width % block) {
        throw Refusal("rows of " + std::to_string(x.width) + " cannot be rotated in runs of " + std::to_string(block));
    }
    add_rows(program, Kind::kElementwise, rows, 8 * int64_t(x.width), [=](const Run& run, int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) {
            run.kernels.hadamard(x.data + row * x.width, signs, x.width, block, inverse, out + row * x.width);
        }
    });
}

}  // namespace pocketllm
