// Keys and values on their way into the cache: keys transposed within their block, both narrowed.
#include "attention/attention.h"
#include "elementwise/floats.h"

namespace pocketllm::POCKETLLM_ISA {

namespace {

// Ask for the lines that a head's values go to, all at once: they are long gone from the caches.
template <class Element>
void fetch(int dim, Element* to, int64_t stride) {
    constexpr int kLine = 64;
    const int64_t step = stride * int64_t(sizeof(Element)) < kLine ? kLine / (stride * int64_t(sizeof(Element))) : 1;
    for (int64_t i = 0; i < dim; i += step) __builtin_prefetch(to + i * stride, 1);
}

template <class Element>
void put(const float* from, int dim, Element* to, int64_t stride) {
    for (int i = 0; i < dim; ++i) narrow(from[i], to[i * stride]);
}

// A scale for all of the head's values, so that its largest becomes 127.
void put_int8(const float* from, int dim, int8_t* to, int64_t stride, float* scale) {
    float most = 0.0f;
    for (int i = 0; i < dim; ++i) most = std::fabs(from[i]) > most ? std::fabs(from[i]) : most;
    *scale = most / 127.0f;
    const float by = most > 0.0f ? 127.0f / most : 0.0f;
    for (int i = 0; i < dim; ++i) to[i * stride] = int8_t(std::nearbyint(from[i] * by));
}

template <class Element>
void put_all(const KvLayout& cache, uint8_t* place, int64_t offset, const float* k, const float* v) {
    const int64_t size = cache.block_size;
    Element* keys = (Element*)place;
    Element* values = (Element*)(place + cache.values_at);
    if (cache.is_latent) return put(v, cache.key_dim, (Element*)place + offset * cache.value_stride, 1);
    for (int head = 0; head < cache.kv_heads; ++head) {
        fetch(cache.key_dim, keys + head * cache.key_dim * size + offset, size);
        fetch(cache.value_dim, values + (head * size + offset) * cache.value_dim, 1);
    }
    for (int head = 0; head < cache.kv_heads; ++head, k += cache.key_dim, v += cache.value_dim) {
        put(k, cache.key_dim, keys + head * cache.key_dim * size + offset, size);
        put(v, cache.value_dim, values + (head * size + offset) * cache.value_dim, 1);
    }
}

template <class Element>
void take(const KvLayout& cache, const uint8_t* place, int64_t offset, float* out) {
    const Element* from = (const Element*)place + offset * cache.value_stride;
    for (int i = 0; i < cache.key_dim; ++i) out[i] = widen(from[i]);
}

void put_all_int8(const KvLayout& cache, uint8_t* place, int64_t offset, const float* k, const float* v) {
    const int64_t size = cache.block_size;
    int8_t* keys = (int8_t*)place;
    int8_t* values = (int8_t*)(place + cache.values_at);
    float* key_scales = (float*)(place + cache.key_scales_at);
    float* value_scales = (float*)(place + cache.value_scales_at);
    if (cache.is_latent) {
        return put_int8(v, cache.key_dim, keys + offset * cache.value_stride, 1, value_scales + offset);
    }
    for (int head = 0; head < cache.kv_heads; ++head, k += cache.key_dim, v += cache.value_dim) {
        put_int8(k, cache.key_dim, keys + head * cache.key_dim * size + offset, size,
                 key_scales + head * size + offset);
        put_int8(v, cache.value_dim, values + (head * size + offset) * cache.value_dim, 1,
                 value_scales + head * size + offset);
    }
}

}  // namespace

void store_kv(const KvLayout& cache, uint8_t* layer, int64_t slot, const float* k, const float* v) {
    uint8_t* place = layer + slot / cache.block_size * cache.block_bytes;
    const int64_t offset = slot % cache.block_size;
    switch (cache.dtype) {
        case KvDtype::kFloat32: return put_all<float>(cache, place, offset, k, v);
        case KvDtype::kFloat16: return put_all<Half>(cache, place, offset, k, v);
        case KvDtype::kBFloat16: return put_all<BFloat>(cache, place, offset, k, v);
        case KvDtype::kInt8: return put_all_int8(cache, place, offset, k, v);
    }
}

void load_latent(const KvLayout& cache, const uint8_t* layer, int64_t slot, float* out) {
    const uint8_t* place = layer + slot / cache.block_size * cache.block_bytes;
    const int64_t offset = slot % cache.block_size;
    switch (cache.dtype) {
        case KvDtype::kFloat32: return take<float>(cache, place, offset, out);
        case KvDtype::kFloat16: return take<Half>(cache, place, offset, out);
        case KvDtype::kBFloat16: return take<BFloat>(cache, place, offset, out);
        case KvDtype::kInt8: break;
    }
    take<int8_t>(cache, place, offset, out);
    const float scale = ((const float*)(place + cache.value_scales_at))[offset];
    for (int i = 0; i < cache.key_dim; ++i) out[i] *= scale;
}

}  // namespace pocketllm::POCKETLLM_ISA
