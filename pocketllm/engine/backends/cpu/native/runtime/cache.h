// Paged keys and values of all layers.
#pragma once

#include "kernels.h"
#include "runtime/memory/regions.h"
#include "runtime/memory/touch.h"

namespace pocketllm {

// Sizes filled in, from those that are asked for. Throws Refusal for what is no cache.
KvLayout kv_layout(KvDtype dtype, int num_layers, int kv_heads, int key_dim, int value_dim, int num_blocks,
                   int block_size);
// The same of a cache of latents, rows of `dim` values.
KvLayout latent_layout(KvDtype dtype, int num_layers, int dim, int num_blocks, int block_size);

struct KvCache {
    // Of entries that each stand for `ratio` tokens and lie in the block, of `block_tokens`, of the last of them.
    KvCache(const KvLayout& layout, int ratio, int block_tokens, bool in_windows = false);
    // Of tokens.
    explicit KvCache(const KvLayout& layout, bool in_windows = false)
        : KvCache(layout, 1, layout.block_size, in_windows) {}

    uint8_t* layer(int number) const { return region.data() + number * layout.layer_bytes; }
    // Where a sequence's entry lies. blocks: the sequence's
    int64_t slot_of(const int32_t* blocks, int64_t entry) const {
        const int64_t last = (entry + 1) * ratio - 1;
        return int64_t(blocks[last / block_tokens]) * layout.block_size + last % block_tokens / ratio;
    }

    // Blocks up to this one are about to be written.
    void follow(int64_t block) { toucher.follow(size_t(block + 1) * layout.block_bytes); }

    const KvLayout layout;
    const int ratio, block_tokens;
    const bool in_windows;  // whether a step's window_table and window_slots are of its blocks
    Region region;
    Toucher toucher;  // of the region: gone before it
};

}  // namespace pocketllm
