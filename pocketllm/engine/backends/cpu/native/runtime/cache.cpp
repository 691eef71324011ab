#include "runtime/cache.h"

#include <new>

#include "runtime/phase.h"

namespace pocketllm {

namespace {

int64_t whole_lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }

int64_t element_bytes(KvDtype dtype) {
    switch (dtype) {
        case KvDtype::kFloat32: return 4;
        case KvDtype::kFloat16:
        case KvDtype::kBFloat16: return 2;
        case KvDtype::kInt8: return 1;
    }
    throw Refusal("no such dtype of keys and values");
}

}  // namespace

KvLayout kv_layout(KvDtype dtype, int num_layers, int kv_heads, int key_dim, int value_dim, int num_blocks,
                   int block_size) {
    if (num_layers < 1 || kv_heads < 1 || key_dim < 1 || value_dim < 1 || num_blocks < 1 || block_size < 1) {
        throw Refusal("a cache needs at least one layer, head, dimension, block and token in a block");
    }
    KvLayout layout{};
    layout.dtype = dtype;
    layout.num_layers = num_layers;
    layout.kv_heads = kv_heads;
    layout.key_dim = key_dim;
    layout.value_dim = value_dim;
    layout.num_blocks = num_blocks;
    layout.block_size = block_size;
    layout.value_stride = value_dim;
    const int64_t keys = int64_t(kv_heads) * block_size, element = element_bytes(dtype);
    const int64_t scales = dtype == KvDtype::kInt8 ? whole_lines(keys * sizeof(float)) : 0;
    layout.values_at = whole_lines(keys * key_dim * element);
    layout.key_scales_at = layout.values_at + whole_lines(keys * value_dim * element);
    layout.value_scales_at = layout.key_scales_at + scales;
    layout.layer_bytes = layout.value_scales_at + scales;
    layout.block_bytes = layout.layer_bytes * num_layers;
    return layout;
}

KvLayout latent_layout(KvDtype dtype, int num_layers, int dim, int num_blocks, int block_size) {
    KvLayout layout = kv_layout(dtype, num_layers, 1, dim, dim, num_blocks, block_size);
    layout.is_latent = true;
    layout.values_at = 0;
    layout.key_scales_at = layout.value_scales_at = whole_lines(int64_t(block_size) * dim * element_bytes(dtype));
    layout.layer_bytes = layout.value_scales_at;
    if (dtype == KvDtype::kInt8) layout.layer_bytes += whole_lines(block_size * sizeof(float));
    layout.block_bytes = layout.layer_bytes * num_layers;
    return layout;
}

// a vector may be read past the last value
KvCache::KvCache(const KvLayout& layout, int ratio, int block_tokens, bool in_windows)
    : layout(layout),
      ratio(ratio),
      block_tokens(block_tokens),
      in_windows(in_windows),
      region(layout.block_bytes * layout.num_blocks + 64),
      toucher(region.data(), region.bytes()) {}

}  // namespace pocketllm
