// How many rows and heads of a model are worked at together.
#pragma once

#include <algorithm>

#include "model.h"

namespace gea {

constexpr int64_t TILE_HEADS = 48;  // rows times heads of a group: their scores and queries are 36 KB

inline int64_t group_size(const Model &model) { return model.num_heads / model.num_kv_heads; }
inline int64_t rows_per_tile(const Model &model) { return std::max<int64_t>(1, TILE_HEADS / group_size(model)); }
inline int64_t heads_per_tile(const Model &model) { return rows_per_tile(model) * group_size(model); }

}  // namespace gea
