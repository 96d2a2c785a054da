// The softmax of some rows over one partition of positions: scores, weights, weighted sums of values.
#pragma once

#include <algorithm>
#include <cmath>

#include "attention.h"
#include "vector.h"

namespace gea {

constexpr float NOTHING = -INFINITY;

// A softmax under way, for rows times heads: weighted sums of values, the largest score, the sum of weights.
struct Partial {
    float *sums;   // (rows heads, head_dim)
    float *most;   // (rows heads,); NOTHING while no position was visible
    float *total;  // (rows heads,)

    static int64_t size(int64_t num_heads, int64_t head_dim) { return num_heads * (head_dim + 2); }

    static Partial at(float *floats, int64_t num_heads, int64_t head_dim) {
        return {floats, floats + num_heads * head_dim, floats + num_heads * (head_dim + 1)};
    }
};

// The keys and values of one sequence, layer and head.
template <class T>
struct View {
    const T *keys, *values;
    const float *key_scales, *value_scales;
    const int32_t *table;
    int64_t block_size, head_dim, first_entry, num_kv_heads;

    View(const Model &model, const Batch &batch, int64_t segment, int64_t layer, int64_t head)
        : keys(reinterpret_cast<const T *>(model.keys)),
          values(reinterpret_cast<const T *>(model.values)),
          key_scales(model.key_scales),
          value_scales(model.value_scales),
          table(batch.table(segment)),
          block_size(model.block_size),
          head_dim(model.head_dim),
          first_entry(layer * model.num_blocks * model.num_kv_heads + head),
          num_kv_heads(model.num_kv_heads) {}

    int64_t entry(int64_t position) const { return first_entry + table[position / block_size] * num_kv_heads; }
    int64_t slot(int64_t position) const { return entry(position) * block_size + position % block_size; }
    const T *key(int64_t position) const {
        return keys + entry(position) * block_size * head_dim + position % block_size;
    }
    const T *value(int64_t position) const { return values + slot(position) * head_dim; }
};

// What each row of a tile sees within a partition.
struct Sight {
    int64_t position, window, group, begin, start, stop;

    Sight(const Tile &tile, int64_t window, int64_t group, int64_t part)
        : position(tile.position), window(window), group(group), begin(part * PARTITION) {
        start = std::max(begin, lowest(0)) - begin;
        stop = std::min(begin + PARTITION, position + tile.num_rows) - begin;
    }

    // The lowest position that a row sees.
    int64_t lowest(int64_t row) const { return window > 0 ? std::max<int64_t>(0, position + row - window + 1) : 0; }

    // The bounds of what a row times head sees, from the partition's begin.
    int64_t first(int64_t head) const { return std::max(start, lowest(head / group) - begin); }
    int64_t last(int64_t head) const { return std::min(stop, position + head / group + 1 - begin); }
};

// One partition of one head, of a tile's rows.
template <class T>
struct Part {
    View<T> view;
    Sight sight;
};

// Attends from `queries` (num_heads, head_dim) within a part. `scores` is scratch for (num_heads, PARTITION). The keys
// of `next` are fetched on the way; null where there is no next part.
template <class T>
void attend_part(const Part<T> &part, const Part<T> *next, const float *queries, int64_t num_heads, float *scores,
                 const Partial &out);

// Adds the next partition to what came before it.
void merge(const Partial &whole, const Partial &next, int64_t num_heads, int64_t head_dim);

}  // namespace gea
