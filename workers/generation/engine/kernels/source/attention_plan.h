// How many rows and heads of a model are worked at together.
#pragma once

#include <algorithm>

#include "attention.h"

namespace gea {

constexpr int64_t TILE_HEADS = 48;  // rows times heads of a group: their scores and queries are 36 KB

inline int64_t group_size(const Model &model) { return model.num_heads / model.num_kv_heads; }
inline int64_t rows_per_tile(const Model &model) { return std::max<int64_t>(1, TILE_HEADS / group_size(model)); }
inline int64_t heads_per_tile(const Model &model) { return rows_per_tile(model) * group_size(model); }

// What one thread takes of a task: the key/value heads from `first_head` up to `last_head`.
struct Piece {
    int64_t task, first_head, last_head;
};

inline Piece piece_at(const Model &model, const Plan &plan, int64_t number) {
    const int64_t num_chunks = (model.num_kv_heads + plan.heads_at_once - 1) / plan.heads_at_once;
    const int64_t first = number % num_chunks * plan.heads_at_once;
    return {number / num_chunks, first, std::min(first + plan.heads_at_once, model.num_kv_heads)};
}

}  // namespace gea
