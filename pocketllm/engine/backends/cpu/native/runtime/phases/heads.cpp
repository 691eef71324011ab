// Projections of heads, each through a matrix of its own.
#include <string>

#include "layouts/formats.h"
#include "runtime/phases/phases.h"

namespace pocketllm {

namespace {

// A head is a chunk: its rows are quantized by whoever multiplies them.
class HeadsPhase : public Phase {
  public:
    HeadsPhase(const Kernels& kernels, Buffer x, Activations activations, const Matrix* const* heads, int num_heads,
               float* out)
        : Phase(Kind::kMultiply),
          x_(x),
          heads_(heads),
          num_heads_(num_heads),
          quantized_(is_float_format(heads[0]->format) ? nullptr : kernels.rows_of(activations)),
          out_(out) {}

    Room prepare(const Step& step, int) override {
        return {0, quantized_ ? step.tokens() * quantized_->bytes(heads_[0]->cols) : 0};
    }

    int num_chunks(const Step& step, int) const override { return step.tokens() ? num_heads_ : 0; }

    void run(const Run& run, int head, int) const override {
        const Matrix& w = *heads_[head];
        const int tokens = run.step.tokens(), groups = (w.rows + kGroupRows - 1) / kGroupRows;
        const float* x = x_.data + head * w.cols;
        const Output out{out_ + head * w.rows, int64_t(num_heads_) * w.rows, nullptr, nullptr, 0};
        if (!quantized_) return run.kernels.matmul_f32(w, x, x_.width, tokens, 0, groups, out);
        quantized_->quantize(x, x_.width, w.cols, 0, tokens, nullptr, 0.0f, run.mine);
        quantized_->matmul(w, run.mine, tokens, 0, groups, out);
    }

    double bytes(const Step& step) const override {
        const Matrix& w = *heads_[0];
        return step.tokens() ? double(num_heads_) * ((w.rows + kGroupRows - 1) / kGroupRows) * w.group_bytes : 0;
    }
    double operations(const Step& step) const override {
        return 2.0 * step.tokens() * num_heads_ * heads_[0]->rows * heads_[0]->cols;
    }

  private:
    const Buffer x_;
    const Matrix* const* const heads_;
    const int num_heads_;
    const QuantizedRows* const quantized_;  // null: floats
    float* const out_;
};

}  // namespace

void add_project_heads(Program& program, const Kernels& kernels, Buffer x, Activations activations,
                       const Matrix* const* heads, int num_heads, float* out) {
    if (num_heads < 1 || num_heads > kMaxChunks || x.width != num_heads * heads[0]->cols) {
        throw Refusal("rows of " + std::to_string(x.width) + " are not those of " + std::to_string(num_heads) +
                      " heads");
    }
    program.add(std::make_unique<HeadsPhase>(kernels, x, activations, heads, num_heads, out));
}

}  // namespace pocketllm
