// One kind of work over the rows of a step, and what it is handed when it runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>

#include "kernels.h"

namespace pocketllm {

// A refusal with a sentence for the user.
struct Refusal : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Which of a step's counts a buffer has as its number of rows.
enum class Rows : int32_t { kTokens, kLogitRows };

// One step's input: the arrays of api/attention.py, ForwardBatch, each contiguous. Mirrored in library.py.
struct Step {
    int32_t num_rows[2];  // by Rows
    int32_t num_sequences, table_width, num_state_slots;
    const int32_t* input_ids;
    const int32_t* positions;
    const int32_t* query_start_loc;
    const int32_t* seq_lens;
    const int32_t* block_table;
    const int64_t* slot_mapping;
    const int32_t* logit_rows;
    const int32_t* state_slots;
    // of caches in windows; null without one
    const int32_t* window_table;
    const int64_t* window_slots;

    const int32_t* table_of(bool in_windows) const { return in_windows ? window_table : block_table; }
    const int64_t* slots_of(bool in_windows) const { return in_windows ? window_slots : slot_mapping; }
    int rows(Rows which) const { return num_rows[static_cast<int>(which)]; }
    int tokens() const { return rows(Rows::kTokens); }
};

// What a step may name at most, by the smallest table, cache and buffer that it is used with.
struct Limits {
    int64_t tokens = INT32_MAX, input_ids = INT32_MAX, slots = INT64_MAX, blocks = INT32_MAX, block_size = 0;
    int64_t state_slots = INT32_MAX, window_slots = INT64_MAX, window_blocks = INT32_MAX;
};

// Bytes of room that a phase needs for a step: one for all threads, and one for each.
struct Room {
    size_t shared = 0, each = 0;
};

struct Run {
    const Kernels& kernels;
    const Step& step;
    int threads;
    uint8_t* shared;  // aligned to 64 bytes, as is `mine`
    uint8_t* mine;    // of the worker at hand
};

enum class Kind : int32_t {
    kEmbed,
    kNorm,
    kQuantize,
    kMultiply,
    kAngles,
    kRope,
    kStoreKv,
    kAttend,
    kElementwise,
    kTake,
    kMixture,
    kRecurrent,
    kStreams,
    kSelect,
    kCompress,
    kCount
};
const char* name_of(Kind kind);

class Phase {
  public:
    explicit Phase(Kind kind) : kind(kind) {}
    virtual ~Phase() = default;

    // Before a step, by one thread: the room it needs. May allocate; what follows may not.
    virtual Room prepare(const Step&, int /*threads*/) { return {}; }
    virtual int num_chunks(const Step& step, int threads) const = 0;
    virtual void run(const Run& run, int chunk, int num_chunks) const = 0;
    // What it reads of weights or cache, and how many multiplications and additions it makes: for the profile.
    virtual double bytes(const Step&) const { return 0; }
    virtual double operations(const Step&) const { return 0; }

    const Kind kind;
};

constexpr int kChunksPerThread = 4;

// Chunks for `rows` rows, each the work of copying `work` floats: enough for all threads, none too small to be worth
// handing out.
inline int row_chunks(int rows, int64_t work, int threads) {
    constexpr int64_t kWorth = 4096;
    int64_t chunks = rows * work / kWorth;
    if (chunks > threads * kChunksPerThread) chunks = threads * kChunksPerThread;
    if (chunks > rows) chunks = rows;
    return rows == 0 ? 0 : chunks < 1 ? 1 : int(chunks);
}

// Where part `part` of `parts` equal parts of n begins.
inline int64_t begin_of(int64_t n, int part, int parts) { return n * part / parts; }

// A buffer of rows: [rows][width] floats.
struct Buffer {
    float* data;
    int32_t width;
};

}  // namespace pocketllm
