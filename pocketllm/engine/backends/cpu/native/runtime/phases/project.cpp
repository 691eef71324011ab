// A projection: rows are normed and quantized once, then multiplied with every matrix.
#include <algorithm>
#include <string>

#include "layouts/formats.h"
#include "runtime/phases/phases.h"

namespace pocketllm {

namespace {

// Where rows lie in the shared room on their way into the matrices: floats if any matrix wants those, then integers.
struct Way {
    const Kernels& kernels;
    Rows rows;
    Buffer x;
    const float* norm;
    float eps;
    bool floats;
    const QuantizedRows* quantized;  // null if no matrix wants them

    size_t row_bytes() const { return quantized ? quantized->bytes(x.width) : x.width * sizeof(float); }
    // floats that are not normed are multiplied where they are
    bool copies_floats() const { return floats && norm; }
    size_t float_bytes(const Step& step) const {
        return copies_floats() ? (size_t(step.rows(rows)) * x.width * sizeof(float) + 63) / 64 * 64 : 0;
    }
    size_t shared_bytes(const Step& step) const {
        return float_bytes(step) + (quantized ? step.rows(rows) * row_bytes() : 0);
    }
};

class QuantizePhase : public Phase {
  public:
    explicit QuantizePhase(const Way& way) : Phase(way.quantized ? Kind::kQuantize : Kind::kNorm), way_(way) {}

    Room prepare(const Step& step, int) override { return {way_.shared_bytes(step), 0}; }

    int num_chunks(const Step& step, int threads) const override {
        return row_chunks(step.rows(way_.rows), 4 * way_.x.width, threads);
    }

    void run(const Run& run, int chunk, int num_chunks) const override {
        const int rows = run.step.rows(way_.rows), width = way_.x.width;
        const int first = int(begin_of(rows, chunk, num_chunks)), last = int(begin_of(rows, chunk + 1, num_chunks));
        if (way_.copies_floats()) {
            const int64_t at = int64_t(first) * width;
            run.kernels.rms_norm(way_.x.data + at, last - first, width, way_.norm, way_.eps,
                                 reinterpret_cast<float*>(run.shared) + at);
        }
        if (way_.quantized) {
            way_.quantized->quantize(way_.x.data, width, width, first, last, way_.norm, way_.eps,
                                     run.shared + way_.float_bytes(run.step));
        }
    }

  private:
    const Way way_;
};

// All matrices of one call, as if they were one: chunks are cut by bytes, anywhere between two groups of rows.
class MultiplyPhase : public Phase {
  public:
    MultiplyPhase(const Way& way, std::vector<ProjectionPlan> projections)
        : Phase(Kind::kMultiply), way_(way), projections_(std::move(projections)) {
        for (const ProjectionPlan& projection : projections_) {
            total_bytes_ += int64_t(groups_of(projection)) * projection.weight->group_bytes;
            total_groups_ += groups_of(projection);
        }
    }

    int num_chunks(const Step& step, int threads) const override {
        if (step.rows(way_.rows) == 0) return 0;
        if (threads == 1 || total_groups_ < 2 * threads) return int(std::min<int64_t>(threads, total_groups_));
        if (step.rows(way_.rows) > rows_at_once()) {
            const int64_t worth = std::max<int64_t>(threads * kSmallChunks, total_bytes_ / kCacheBytes + 1);
            return int(std::min<int64_t>({worth, total_groups_, kMaxChunks}));
        }
        return threads * (1 + kSmallChunks);
    }

    void run(const Run& run, int chunk, int num_chunks) const override {
        const int rows = run.step.rows(way_.rows), at_once = rows_at_once();
        const int64_t first = begin_of_chunk(rows, chunk, num_chunks, run.threads);
        const int64_t last = begin_of_chunk(rows, chunk + 1, num_chunks, run.threads);
        for (int row = 0; row < rows; row += at_once) multiply(run, first, last, row, std::min(at_once, rows - row));
    }

    double bytes(const Step& step) const override { return step.rows(way_.rows) ? double(total_bytes_) : 0; }
    double operations(const Step& step) const override {
        double elements = 0;
        for (const ProjectionPlan& projection : projections_)
            elements += double(projection.weight->rows) * way_.x.width;
        return 2 * elements * step.rows(way_.rows);
    }

  private:
    static constexpr int kSmallChunks = 4;             // for each thread
    static constexpr int64_t kCacheBytes = 384 << 10;  // what stays in a core's L2 cache: of rows, and of a matrix
    static constexpr int kTile = 16;

    int rows_at_once() const { return std::max(kTile, int(kCacheBytes / int64_t(way_.row_bytes())) / kTile * kTile); }

    // Few rows: a large chunk for each thread, which streams through memory, and then small ones, which even out who is
    // late. Many rows, which are multiplied some at a time: even chunks, that stay in a cache meanwhile.
    int64_t begin_of_chunk(int rows, int chunk, int num_chunks, int threads) const {
        if (rows > rows_at_once() || num_chunks <= threads) return begin_of(total_bytes_, chunk, num_chunks);
        const int64_t large = total_bytes_ / 4 * 3;
        if (chunk <= threads) return begin_of(large, chunk, threads);
        return large + begin_of(total_bytes_ - large, chunk - threads, num_chunks - threads);
    }

    static int groups_of(const ProjectionPlan& projection) {
        return (projection.weight->rows + kGroupRows - 1) / kGroupRows;
    }

    // Groups whose first byte is in [first_byte, last_byte) of all matrices, for some rows.
    void multiply(const Run& run, int64_t first_byte, int64_t last_byte, int row, int count) const {
        int64_t before = 0;
        for (const ProjectionPlan& projection : projections_) {
            const Matrix& w = *projection.weight;
            const int64_t size = int64_t(w.group_bytes), groups = groups_of(projection);
            const auto group_at = [&](int64_t byte) {
                return byte <= before ? 0 : int(std::min((byte - before + size - 1) / size, groups));
            };
            const int first = group_at(first_byte), last = group_at(last_byte);
            before += size * groups;
            if (first >= last) continue;
            const Output out{projection.out + int64_t(row) * w.rows, w.rows, projection.bias,
                             projection.residual ? projection.residual + int64_t(row) * w.rows : nullptr, w.rows};
            if (!way_.quantized || is_float_format(w.format)) {
                const float* x = way_.copies_floats() ? reinterpret_cast<const float*>(run.shared) : way_.x.data;
                run.kernels.matmul_f32(w, x + int64_t(row) * way_.x.width, way_.x.width, count, first, last, out);
            } else {
                const uint8_t* x = run.shared + way_.float_bytes(run.step) + row * way_.row_bytes();
                way_.quantized->matmul(w, x, count, first, last, out);
            }
        }
    }

    const Way way_;
    const std::vector<ProjectionPlan> projections_;
    int64_t total_bytes_ = 0, total_groups_ = 0;
};

}  // namespace

void add_project(Program& program, const Kernels& kernels, Rows rows, Buffer x, const float* norm, float eps,
                 Activations activations, const std::vector<ProjectionPlan>& projections) {
    const QuantizedRows* quantized = kernels.rows_of(activations);
    Way way{kernels, rows, x, norm, eps, false, nullptr};
    for (const ProjectionPlan& projection : projections) {
        if (projection.weight->cols != x.width) {
            throw Refusal("a matrix of " + std::to_string(projection.weight->cols) + " columns cannot take rows of " +
                          std::to_string(x.width));
        }
        if (quantized && !is_float_format(projection.weight->format)) {
            way.quantized = quantized;
        } else {
            way.floats = true;
        }
    }
    if (way.quantized || way.copies_floats()) program.add(std::make_unique<QuantizePhase>(way));
    program.add(std::make_unique<MultiplyPhase>(way, projections));
}

}  // namespace pocketllm
