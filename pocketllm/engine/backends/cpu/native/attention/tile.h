// One tile of keys and values: where its strips of 16 keys are, and the two products over them.
#pragma once

#include "elementwise/floats.h"
#include "kernels.h"

namespace pocketllm::POCKETLLM_ISA {
namespace {

constexpr int kStrip = 16;
constexpr int kStrips = kAttentionTile / kStrip;

template <class Element>
struct Tile {
    const Element* keys[kStrips];    // dimension d of its 16 keys at d * key_stride
    const Element* values[kStrips];  // of 16 keys, value_stride apart; of latents the keys too
    const float* key_scales[kStrips];
    const float* value_scales[kStrips];
    int64_t key_stride, value_stride;
    const Element* next_keys[kStrips];  // of the next tile, or null: fetched while this one's values are mixed
};

// Where the next tile's strips of keys are, as far as the row that sees most keys looks.
template <class Element>
void look_ahead(const AttentionRows& rows, int tile, Tile<Element>& out) {
    const KvLayout& cache = *rows.cache;
    const int64_t size = cache.block_size;
    for (int strip = 0; strip < kStrips; ++strip) {
        const int64_t key = int64_t(tile + 1) * kAttentionTile + strip * kStrip;
        const bool is_there = size % kStrip == 0 && !rows.picked && key < rows.seq_len;
        const uint8_t* place = is_there ? rows.layer + rows.blocks[key / size] * cache.block_bytes : nullptr;
        const int64_t offset = cache.is_latent ? key % size * cache.value_stride
                                               : rows.kv_head * cache.key_dim * size + key % size;
        out.next_keys[strip] = place ? (const Element*)place + offset : nullptr;
    }
}

// Where strips [first, last) of tile `tile` are. Keys that are picked, and blocks that are not whole strips, are gathered
// in `room`.
template <class Element>
void locate(const AttentionRows& rows, int tile, int first, int last, float* room, Tile<Element>& out) {
    const KvLayout& cache = *rows.cache;
    const int64_t size = cache.block_size, key_dim = cache.key_dim, value_dim = cache.value_dim, head = rows.kv_head;
    const bool whole = size % kStrip == 0 && !rows.picked;
    Element* keys = (Element*)room;
    Element* values = cache.is_latent ? keys : keys + kAttentionTile * key_dim;
    float* scales = room + kAttentionTile * (key_dim + value_dim);
    out.key_stride = whole && !cache.is_latent ? size : kStrip;
    out.value_stride = cache.value_stride;
    for (int strip = first; strip < last; ++strip) {
        const int64_t at = int64_t(tile) * kAttentionTile + strip * kStrip;
        if (!whole) {
            out.keys[strip] = keys + strip * kStrip * key_dim;
            out.values[strip] = values + strip * kStrip * cache.value_stride;
            out.key_scales[strip] = scales + strip * kStrip;
            out.value_scales[strip] = scales + kAttentionTile + strip * kStrip;
        }
        for (int64_t key = at; key < at + kStrip && key < rows.seq_len; ++key) {
            const int64_t number = rows.picked ? rows.picked[key] : key;
            const uint8_t* place = rows.layer + rows.blocks[number / size] * cache.block_bytes;
            const int64_t offset = number % size;
            const Element* k = (const Element*)place + head * key_dim * size + offset;
            const Element* v = (const Element*)(place + cache.values_at) + (head * size + offset) * cache.value_stride;
            const float* k_scale = (const float*)(place + cache.key_scales_at) + head * size + offset;
            const float* v_scale = (const float*)(place + cache.value_scales_at) + head * size + offset;
            if (whole) {
                out.keys[strip] = cache.is_latent ? v : k;
                out.values[strip] = v;
                out.key_scales[strip] = k_scale;
                out.value_scales[strip] = v_scale;
                break;
            }
            const int64_t lane = key - at;
            for (int64_t d = 0; d < key_dim && !cache.is_latent; ++d) {
                keys[(strip * key_dim + d) * kStrip + lane] = k[d * size];
            }
            std::memcpy(values + (strip * kStrip + lane) * cache.value_stride, v, cache.value_stride * sizeof(Element));
            if (cache.dtype == KvDtype::kInt8) {
                scales[strip * kStrip + lane] = *k_scale;
                scales[kAttentionTile + strip * kStrip + lane] = *v_scale;
            }
        }
    }
}

// Lines of memory that are asked for ahead of their use: a sequence's blocks lie apart, so the processor does not guess
// them. Few rows only: with many, the work on a line is longer than its way.
constexpr int kLine = 64;
constexpr int kRowsThatWait = 4;

template <class Element>
constexpr int lines_of(int64_t elements) {
    return int((elements * int64_t(sizeof(Element)) + kLine - 1) / kLine);
}

// Lines [first, last) of a strip.
inline void fetch(const void* strip, int first, int last) {
    for (int line = first; line < last; ++line) __builtin_prefetch((const char*)strip + int64_t(line) * kLine);
}

// Scores of R rows with S strips: q [R][ld_q] · keys → out [R][kAttentionTile].
template <int R, int S, class Element>
inline void score_block(const float* q, int ld_q, int key_dim, int value_dim, const Tile<Element>& tile, int strip,
                        float* out) {
    Floats sums[R][S];
    POCKETLLM_WHOLE for (int r = 0; r < R; ++r) {
        POCKETLLM_WHOLE for (int s = 0; s < S; ++s) sums[r][s] = all(0.0f);
    }
    const int value_lines = lines_of<Element>(int64_t(kStrip) * value_dim),
              each = (value_lines + key_dim - 1) / key_dim;
    for (int d = 0; d < key_dim; ++d) {
        if (R <= kRowsThatWait && d * each < value_lines) {
            for (int s = 0; s < S; ++s) fetch(tile.values[strip + s], d * each, d * each + each);
        }
        Floats keys[S];
        POCKETLLM_WHOLE for (int s = 0; s < S; ++s) keys[s] = load(tile.keys[strip + s] + d * tile.key_stride);
        POCKETLLM_WHOLE for (int r = 0; r < R; ++r) {
            const Floats one = all(q[r * ld_q + d]);
            POCKETLLM_WHOLE for (int s = 0; s < S; ++s) accumulate(sums[r][s], one, keys[s]);
        }
    }
    POCKETLLM_WHOLE for (int r = 0; r < R; ++r) {
        POCKETLLM_WHOLE for (int s = 0; s < S; ++s) store(out + r * kAttentionTile + (strip + s) * kStrip, sums[r][s]);
    }
}

template <int R, int S, class Element>
void score_rows(const float* q, int ld_q, int key_dim, int value_dim, const Tile<Element>& tile, int first, int last,
                float* out) {
    int strip = first;
    for (; strip + S <= last; strip += S) score_block<R, S>(q, ld_q, key_dim, value_dim, tile, strip, out);
    for (; strip < last; ++strip) score_block<R, 1>(q, ld_q, key_dim, value_dim, tile, strip, out);
}

// As many rows at once as there are registers for.
template <class Element>
void score(const float* q, int ld_q, int rows, int key_dim, int value_dim, const Tile<Element>& tile, int first,
           int last, float* out) {
    int row = 0;
    const auto take = [&](auto block, auto strips) {
        constexpr int R = decltype(block)::value, S = decltype(strips)::value;
        for (; row + R <= rows; row += R) {
            score_rows<R, S>(q + row * ld_q, ld_q, key_dim, value_dim, tile, first, last, out + row * kAttentionTile);
        }
    };
    if (kNative == 16) take(Int<12>(), Int<2>());
    if (kNative >= 8) take(Int<4>(), Int<kNative == 16 ? 4 : 1>());
    take(Int<3>(), Int<kNative == 16 ? 4 : 1>());
    take(Int<2>(), Int<kNative == 16 ? 4 : 1>());
    take(Int<1>(), Int<kNative == 16 ? 8 : 2>());
}

// Scores of R rows with the keys of strips [first, last) whose dimensions lie side by side.
template <int R, class Element>
void score_latents(const float* q, int ld_q, int key_dim, const Tile<Element>& tile, int first, int last, float* out) {
    for (int key = first * kStrip; key < last * kStrip; ++key) {
        const Element* from = tile.values[key / kStrip] + key % kStrip * tile.value_stride;
        Floats sums[R];
        POCKETLLM_WHOLE for (int r = 0; r < R; ++r) sums[r] = all(0.0f);
        for (int d = 0; d < key_dim; d += kLanes) {
            Floats part = load(from + d);
            if (d + kLanes > key_dim) part = keep(part, 0, key_dim - d, 0.0f);
            POCKETLLM_WHOLE for (int r = 0; r < R; ++r) accumulate(sums[r], load(q + r * ld_q + d), part);
        }
        POCKETLLM_WHOLE for (int r = 0; r < R; ++r) out[r * kAttentionTile + key] = sum(sums[r]);
    }
}

template <class Element>
void score_all_latents(const float* q, int ld_q, int rows, int key_dim, const Tile<Element>& tile, int first, int last,
                       float* out) {
    int row = 0;
    const auto take = [&](auto block) {
        constexpr int R = decltype(block)::value;
        for (; row + R <= rows; row += R) {
            score_latents<R>(q + row * ld_q, ld_q, key_dim, tile, first, last, out + row * kAttentionTile);
        }
    };
    if (kNative == 16) take(Int<12>());
    if (kNative >= 8) take(Int<4>());
    take(Int<1>());
}

// sums [R][ld] += weights [R][kAttentionTile] · values over keys [first, last) and V vectors of dimensions.
template <int R, int V, class Element>
inline void mix_block(const float* weights, const Tile<Element>& tile, int key_dim, int first, int last, float* sums,
                      int ld) {
    Floats acc[R][V];
    POCKETLLM_WHOLE for (int r = 0; r < R; ++r) {
        POCKETLLM_WHOLE for (int v = 0; v < V; ++v) acc[r][v] = load(sums + r * ld + v * kLanes);
    }
    const int next_lines = (lines_of<Element>(int64_t(kStrip) * key_dim) + kStrip - 1) / kStrip;
    for (int key = first; key < last;) {
        const int strip = key / kStrip, end = (strip + 1) * kStrip < last ? (strip + 1) * kStrip : last;
        const Element* from = tile.values[strip] + int64_t(key % kStrip) * tile.value_stride;
        const Element* next = R <= kRowsThatWait ? tile.next_keys[strip] : nullptr;
        for (; key < end; ++key, from += tile.value_stride) {
            if (next) fetch(next, key % kStrip * next_lines, key % kStrip * next_lines + next_lines);
            Floats values[V];
            POCKETLLM_WHOLE for (int v = 0; v < V; ++v) values[v] = load(from + v * kLanes);
            POCKETLLM_WHOLE for (int r = 0; r < R; ++r) {
                const Floats one = all(weights[r * kAttentionTile + key]);
                POCKETLLM_WHOLE for (int v = 0; v < V; ++v) accumulate(acc[r][v], one, values[v]);
            }
        }
    }
    POCKETLLM_WHOLE for (int r = 0; r < R; ++r) {
        POCKETLLM_WHOLE for (int v = 0; v < V; ++v) store(sums + r * ld + v * kLanes, acc[r][v]);
    }
}

// Lanes past value_dim hold the next key's values; they are never read.
template <int R, class Element>
void mix_rows(const float* weights, const Tile<Element>& tile, int key_dim, int value_dim, int first, int last,
              float* sums, int ld) {
    int at = 0;
    Tile<Element> moved = tile;
    const auto take = [&](auto block) {
        constexpr int V = decltype(block)::value;
        for (; at + V * kLanes <= padded_lanes(value_dim); at += V * kLanes) {
            for (int strip = first / kStrip; strip * kStrip < last; ++strip)
                moved.values[strip] = tile.values[strip] + at;
            mix_block<R, V>(weights, moved, key_dim, first, last, sums + at, ld);
            for (const Element*& next : moved.next_keys) next = nullptr;
        }
    };
    if (kNative == 16) take(Int<4>());
    if (kNative >= 8) take(Int<2>());
    take(Int<1>());
}

template <class Element>
void mix(const float* weights, int rows, const Tile<Element>& tile, int key_dim, int value_dim, int first, int last,
         float* sums, int ld) {
    int row = 0;
    const auto take = [&](auto block) {
        constexpr int R = decltype(block)::value;
        for (; row + R <= rows; row += R) {
            mix_rows<R>(weights + row * kAttentionTile, tile, key_dim, value_dim, first, last, sums + row * ld, ld);
        }
    };
    if (kNative == 16) take(Int<6>());
    take(Int<3>());
    take(Int<2>());
    take(Int<1>());
}

}  // namespace
}  // namespace pocketllm::POCKETLLM_ISA
