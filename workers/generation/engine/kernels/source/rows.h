// Work on single rows between the products: norms, quantization, RoPE, the cache's new entries.
#pragma once

#include "model.h"
#include "vector.h"

namespace gea {

// to = weight * from / rms(from), Zhang and Sennrich 2019.
void rms_norm(const float *from, const float *weight, int64_t count, float eps, float *to);

// to = round(from / scale) with the scale such that the largest magnitude becomes 32767; zeros behind, up to `padded`.
float quantize_row(const float *from, int64_t count, int64_t padded, int16_t *to);

// Norms and turns head `head` of a row of query, key and value on top of each other; a key is then written to the cache
// with its value. `head` counts the query heads first, then the key heads.
void place_head(const Model &model, int64_t layer, const Place &place, float *qkv, int64_t head);

}  // namespace gea
