// Paged keys and values of all layers.
#pragma once

#include "kernels.h"
#include "runtime/memory.h"

namespace pocketllm {

// Sizes filled in, from those that are asked for. Throws Refusal for what is no cache.
KvLayout kv_layout(KvDtype dtype, int num_layers, int kv_heads, int key_dim, int value_dim, int num_blocks,
                   int block_size);
// The same of a cache of latents, rows of `dim` values.
KvLayout latent_layout(KvDtype dtype, int num_layers, int dim, int num_blocks, int block_size);

struct KvCache {
    explicit KvCache(const KvLayout& layout);

    uint8_t* layer(int number) const { return region.data() + number * layout.layer_bytes; }

    const KvLayout layout;
    Region region;
};

}  // namespace pocketllm
