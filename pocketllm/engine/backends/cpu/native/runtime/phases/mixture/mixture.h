// What the phases of a mixture of experts share: where its rows stand, and how work on them is cut.
#pragma once

#include <memory>

#include "layouts/formats.h"
#include "runtime/phases/phases.h"

namespace pocketllm {

// Takes parts of the room one after another, each from a new line on.
class Parts {
  public:
    explicit Parts(const uint8_t* base) : base_(reinterpret_cast<uintptr_t>(base)) {}
    template <class T>
    T* take(size_t count) {
        T* part = reinterpret_cast<T*>(base_ + used_);  // from address 0 on when room is only measured
        used_ += (count * sizeof(T) + 63) / 64 * 64;
        return part;
    }
    size_t used() const { return used_; }

  private:
    const uintptr_t base_;
    size_t used_ = 0;
};

// What the phases of one mixture share. A token's row of rank r is entry token · num_used + r; entries stand in slots,
// those of expert e in [begin[e], begin[e + 1]).
struct Mixture {
    const MixturePlan plan;
    const Buffer x;
    const float* const logits;
    float* const out;
    const QuantizedRows* const quantized;  // null: matrices meet floats

    struct Places {
        int32_t *chosen, *slot, *begin;  // [entries], [entries], [num_experts + 1]
        float* weights;                  // [entries]
        float *rows, *gate, *up, *made;  // [slots][in, inner, inner, out]
        uint8_t *quantized, *gated;      // the same as integers, where a matrix wants it
    };

    int inner() const { return plan.gate[0]->rows; }
    int entries(const Step& step) const { return step.tokens() * plan.num_used; }
    bool takes_floats(const Matrix& w) const { return !quantized || is_float_format(w.format); }
    bool opens_floats() const { return takes_floats(*plan.gate[0]) || takes_floats(*plan.up[0]); }
    bool opens_quantized() const { return !takes_floats(*plan.gate[0]) || !takes_floats(*plan.up[0]); }
    bool closes_quantized() const { return !takes_floats(*plan.down[0]); }

    Places places(const Step& step, Parts parts, size_t* used = nullptr) const {
        const size_t n = entries(step);
        Places p{};
        p.chosen = parts.take<int32_t>(n);
        p.slot = parts.take<int32_t>(n);
        p.begin = parts.take<int32_t>(plan.num_experts + 1);
        p.weights = parts.take<float>(n);
        p.gate = parts.take<float>(n * inner());
        p.up = parts.take<float>(n * inner());
        p.made = parts.take<float>(n * x.width);
        p.rows = parts.take<float>(opens_floats() ? n * x.width : 0);
        p.quantized = parts.take<uint8_t>(opens_quantized() ? n * quantized->bytes(x.width) : 0);
        p.gated = parts.take<uint8_t>(closes_quantized() ? n * quantized->bytes(inner()) : 0);
        if (used) *used = parts.used();
        return p;
    }
    Places places(const Run& run) const { return places(run.step, Parts(run.shared)); }
};

using Shared = std::shared_ptr<Mixture>;

// -- route.cpp
// Bytes that routing a token takes of a thread's room.
size_t route_bytes(int num_experts);
// A token's experts and weights into its entries.
void route(const Mixture& mixture, const Run& run, const Mixture::Places& places, int token);
// Gives every entry a slot, experts one after another and tokens in order.
void group(const Mixture& mixture, const Run& run, const Mixture::Places& places);

// Work on one row of a mixture: a token, or a slot.
using OnRow = void (*)(const Mixture& mixture, const Run& run, const Mixture::Places& places, int row);

class MixtureRows : public Phase {
  public:
    MixtureRows(Shared mixture, bool of_slots, int64_t work, OnRow on_row)
        : Phase(Kind::kMixture), mixture_(std::move(mixture)), of_slots_(of_slots), work_(work), on_row_(on_row) {}

    Room prepare(const Step& step, int) override {
        Room room;
        mixture_->places(step, Parts(nullptr), &room.shared);
        room.each = route_bytes(mixture_->plan.num_experts);
        return room;
    }
    int num_chunks(const Step& step, int threads) const override { return row_chunks(count(step), work_, threads); }
    void run(const Run& run, int chunk, int num_chunks) const override {
        const int64_t rows = count(run.step);
        const Mixture::Places places = mixture_->places(run);
        for (int64_t row = begin_of(rows, chunk, num_chunks); row < begin_of(rows, chunk + 1, num_chunks); ++row) {
            on_row_(*mixture_, run, places, int(row));
        }
    }

  private:
    int count(const Step& step) const { return of_slots_ ? mixture_->entries(step) : step.tokens(); }

    const Shared mixture_;
    const bool of_slots_;
    const int64_t work_;
    const OnRow on_row_;
};

}  // namespace pocketllm
