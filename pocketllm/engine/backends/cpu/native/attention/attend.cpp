// Attention of some rows of queries over tiles of keys at fixed places. Each tile gives a partial result (a sum of
// values, the largest score and the sum of weights), and partials are merged first tile first: so a row's bits depend
// neither on which rows are computed beside it nor on which threads compute the tiles.
#include "attention/attention.h"
#include "attention/tile.h"

namespace pocketllm::POCKETLLM_ISA {

namespace {

// What one row may see of a tile: keys [first, last) of it.
struct Span {
    int first, last;
};

struct Scratch {
    float *q, *weights, *tile, *total, *room;
    int ld_q, ld;
};

Scratch divide(float* scratch, int key_dim, int value_dim) {
    const int ld_q = padded_lanes(key_dim), ld = partial_floats(value_dim);
    float* q = scratch;
    float* weights = q + kAttentionRows * ld_q;
    float* tile = weights + kAttentionRows * kAttentionTile;
    float* total = tile + kAttentionRows * ld;
    return {q, weights, tile, total, total + kAttentionRows * ld, ld_q, ld};
}

Span span_of(const AttentionRows& rows, int row, int tile) {
    const int position = rows.seq_len - rows.num_tokens + row / rows.group, start = tile * kAttentionTile;
    int first = rows.window > 0 && position >= rows.window ? position - rows.window + 1 - start : -start;
    int last = position + 1 - start;
    if (first < 0) first = 0;
    if (last > kAttentionTile) last = kAttentionTile;
    return {first, first < last ? last : first};
}

// Scores of keys [span) of a row become weights e^(score - largest); returns the largest and the sum in `tail`.
void soften(const AttentionRows& rows, Span span, const float* const* key_scales, float* scores, float* tail) {
    const int begin = span.first / kStrip * kStrip;
    Floats most = all(-INFINITY);
    for (int at = begin; at < span.last; at += kStrip) {
        Floats part = load(scores + at);
        if (key_scales) part = part * load(key_scales[at / kStrip]);
        if (rows.softcap > 0) part = tanh(part * all(1 / rows.softcap)) * all(rows.softcap);
        if (at < span.first || at + kStrip > span.last) part = keep(part, span.first - at, span.last - at, -INFINITY);
        store(scores + at, part);
        most = larger(part, most);
    }
    const float top = largest(most);
    Floats total = all(0.0f);
    for (int at = begin; at < span.last; at += kStrip) {
        Floats part = exp(load(scores + at) - all(top));
        if (at < span.first || at + kStrip > span.last) part = keep(part, span.first - at, span.last - at, 0.0f);
        store(scores + at, part);
        total = total + part;
    }
    tail[0] = top;
    tail[1] = sum(total);
}

// total += part, two partial results of one row over different keys; a sum of weights of 0 means no keys yet.
void merge_row(float* total, const float* part, int lanes) {
    float* tail = total + lanes;
    const float* other = part + lanes;
    if (other[1] == 0) return;
    if (tail[1] == 0) {
        std::memcpy(total, part, (lanes + 2) * sizeof(float));
        return;
    }
    const float top = tail[0] > other[0] ? tail[0] : other[0];
    float by[kLanes] = {tail[0] - top, other[0] - top};
    store(by, exp(load(by)));
    for (int at = 0; at < lanes; at += kLanes) {
        store(total + at, fma(load(total + at), all(by[0]), load(part + at) * all(by[1])));
    }
    tail[1] = tail[1] * by[0] + other[1] * by[1];
    tail[0] = top;
}

void write_row(const AttentionRows& rows, int row, const float* total) {
    const int value_dim = rows.cache->value_dim;
    const float top = total[padded_lanes(value_dim)], weights = total[padded_lanes(value_dim) + 1];
    float* out = rows.out + row / rows.group * rows.ld_out + row % rows.group * value_dim;
    if (!rows.sinks) {
        for (int i = 0; i < value_dim; ++i) out[i] = total[i] / weights;
        return;
    }
    const float sink = rows.sinks[row % rows.group], most = top > sink ? top : sink;
    float by[kLanes] = {top - most, sink - most};
    store(by, exp(load(by)));
    for (int i = 0; i < value_dim; ++i) out[i] = total[i] * by[0] / (weights * by[0] + by[1]);
}

// One tile's partial result of each row, to `out` [rows][ld].
template <class Element>
void attend_tile(const AttentionRows& rows, int index, bool is_first, const Scratch& scratch, float* out) {
    constexpr bool is_int8 = std::is_same_v<Element, int8_t>;
    const KvLayout& cache = *rows.cache;
    const int count = rows.last_row - rows.first_row, lanes = padded_lanes(cache.value_dim);
    Span spans[kAttentionRows], inner{0, kAttentionTile}, outer{kAttentionTile, 0};
    for (int r = 0; r < count; ++r) {
        const Span span = spans[r] = span_of(rows, rows.first_row + r, index);
        inner = {span.first > inner.first ? span.first : inner.first, span.last < inner.last ? span.last : inner.last};
        if (span.first == span.last) continue;
        outer = {span.first < outer.first ? span.first : outer.first, span.last > outer.last ? span.last : outer.last};
    }
    std::memset(out, 0, sizeof(float) * count * scratch.ld);
    if (outer.first >= outer.last) return;
    const int first = outer.first / kStrip, last = (outer.last + kStrip - 1) / kStrip;
    Tile<Element> tile;
    locate(rows, index, first, last, scratch.room, tile);
    look_ahead(rows, index, tile);
    if (is_first && count <= kRowsThatWait) {
        for (int strip = first; strip < last; ++strip)
            fetch(tile.keys[strip], 0, lines_of<Element>(tile.key_stride * cache.key_dim));
    }
    if (cache.is_latent) {
        score_all_latents(scratch.q, scratch.ld_q, count, cache.key_dim, tile, first, last, scratch.weights);
    } else {
        score(scratch.q, scratch.ld_q, count, cache.key_dim, cache.value_dim, tile, first, last, scratch.weights);
    }
    for (int r = 0; r < count; ++r) {
        float* weights = scratch.weights + r * kAttentionTile;
        if (spans[r].first == spans[r].last) continue;
        soften(rows, spans[r], is_int8 ? tile.key_scales : nullptr, weights, out + r * scratch.ld + lanes);
        if (is_int8) {
            for (int strip = spans[r].first / kStrip; strip * kStrip < spans[r].last; ++strip) {
                float* part = weights + strip * kStrip;
                store(part, load(part) * load(tile.value_scales[strip]));
            }
        }
    }
    // keys that all rows see go together; what a row may not see it must not even weigh with zero: it may be infinite
    const auto row_alone = [&](int r, int from, int to) {
        if (from >= to) return;
        mix(scratch.weights + r * kAttentionTile, 1, tile, cache.key_dim, cache.value_dim, from, to,
            out + r * scratch.ld, scratch.ld);
    };
    if (inner.first >= inner.last) {
        for (int r = 0; r < count; ++r) row_alone(r, spans[r].first, spans[r].last);
        return;
    }
    for (int r = 0; r < count; ++r) row_alone(r, spans[r].first, inner.first);
    mix(scratch.weights, count, tile, cache.key_dim, cache.value_dim, inner.first, inner.last, out, scratch.ld);
    for (int r = 0; r < count; ++r) row_alone(r, inner.last, spans[r].last);
}

template <class Element>
void attend_as(const AttentionRows& rows, int first_tile, int last_tile, float* partials, float* room) {
    const KvLayout& cache = *rows.cache;
    const int count = rows.last_row - rows.first_row, lanes = padded_lanes(cache.value_dim);
    const Scratch scratch = divide(room, cache.key_dim, cache.value_dim);
    for (int r = 0; r < count; ++r) {
        const int row = rows.first_row + r;
        const int token = row / rows.group, head = row % rows.group, rest_dim = cache.key_dim - rows.q_dim;
        const float* q = rows.q + token * rows.ld_q + head * rows.q_dim;
        const float* rest = rows.q_rest + token * rows.ld_q_rest + head * rest_dim;
        float* to = scratch.q + r * scratch.ld_q;
        for (int d = 0; d < rows.q_dim; ++d) to[d] = q[d] * rows.scale;
        for (int d = 0; d < rest_dim; ++d) to[rows.q_dim + d] = rest[d] * rows.scale;
        for (int d = cache.key_dim; d < scratch.ld_q; ++d) to[d] = 0.0f;
    }
    for (int tile = first_tile; tile < last_tile; ++tile) {
        float* out = partials            ? partials + int64_t(tile - first_tile) * count * scratch.ld
                     : tile > first_tile ? scratch.tile
                                         : scratch.total;
        attend_tile<Element>(rows, tile, tile == first_tile, scratch, out);
        if (out != scratch.tile) continue;
        for (int r = 0; r < count; ++r) merge_row(scratch.total + r * scratch.ld, out + r * scratch.ld, lanes);
    }
    if (partials) return;
    for (int r = 0; r < count; ++r) write_row(rows, rows.first_row + r, scratch.total + r * scratch.ld);
}

}  // namespace

void attend(const AttentionRows& rows, int first_tile, int last_tile, float* partials, float* scratch) {
    switch (rows.cache->dtype) {
        case KvDtype::kFloat32: return attend_as<float>(rows, first_tile, last_tile, partials, scratch);
        case KvDtype::kFloat16: return attend_as<Half>(rows, first_tile, last_tile, partials, scratch);
        case KvDtype::kBFloat16: return attend_as<BFloat>(rows, first_tile, last_tile, partials, scratch);
        case KvDtype::kInt8: return attend_as<int8_t>(rows, first_tile, last_tile, partials, scratch);
    }
}

void merge(const AttentionRows& rows, int num_tiles, const float* partials, float* room) {
    const KvLayout& cache = *rows.cache;
    const int count = rows.last_row - rows.first_row, lanes = padded_lanes(cache.value_dim);
    const Scratch scratch = divide(room, cache.key_dim, cache.value_dim);
    std::memset(scratch.total, 0, sizeof(float) * count * scratch.ld);
    for (int tile = 0; tile < num_tiles; ++tile) {
        for (int r = 0; r < count; ++r) {
            merge_row(scratch.total + r * scratch.ld, partials + (int64_t(tile) * count + r) * scratch.ld, lanes);
        }
    }
    for (int r = 0; r < count; ++r) write_row(rows, rows.first_row + r, scratch.total + r * scratch.ld);
}

}  // namespace pocketllm::POCKETLLM_ISA
