// Work on single rows between the products: norms, RoPE, the cache's new entries.
#pragma once

#include "model.h"
#include "vector.h"

namespace gea {

// to = weight * from / rms(from), Zhang and Sennrich 2019.
void rms_norm(const float *from, const float *weight, int64_t count, float eps, float *to);

// Writes a key and value of head_dim numbers to the cache. `entry` is the number of layer, block and head.
void write_entry(const Model &model, int64_t entry, int64_t offset, const float *key, const float *value);

// Norms and turns head `head` of a row of query, key and value on top of each other; a key is then written to the cache
// with its value. `head` counts the query heads first, then the key heads.
void place_head(const Model &model, int64_t layer, const Place &place, float *qkv, int64_t head);

}  // namespace gea
