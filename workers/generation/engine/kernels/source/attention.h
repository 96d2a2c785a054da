// Attention of new rows to the paged keys and values of their own sequence (Kwon et al. 2023), for prefill and decode.
//
// The positions of a sequence are cut into partitions of fixed bounds; the softmax of a row is put together from them
// in their order (Milakov and Gimelshein 2018). Whatever splits the work, every row goes through the same sums.
#pragma once

#include "model.h"
#include "threads.h"

namespace gea {

constexpr int64_t PARTITION = 128;  // positions; scores of a tile stay in the first-level cache

// Consecutive rows of one segment, whose heads of one group are worked at together.
struct Tile {
    int32_t segment;
    int32_t first_row;  // in the batch
    int32_t num_rows;
    int32_t position;   // of the first row
    int32_t num_parts;  // that are tasks of their own; 1: the partitions follow each other in one task
    int64_t partials;   // where the partitions' results lie, in floats; for num_parts > 1
};

struct Task {
    int32_t tile;
    int32_t part;
};

// What one step has to attend to, for all layers. `pending` counts the partitions of a tile and head still to come.
struct Plan {
    Tile *tiles;
    Task *tasks;
    std::atomic<int32_t> *pending;  // (num_tiles, num_kv_heads)
    float *partials;
    int64_t num_tiles, num_tasks, num_partials;
    int64_t most_cost;      // of a task; tiles above it are split where there are threads to split for
    int64_t heads_at_once;  // key/value heads that a thread takes of a task: they are neighbours in memory
    bool is_split;
};

// The sizes that a plan of the last `counts` rows of each segment needs, and then the plan.
void measure_plan(const Model &model, const Batch &batch, const int32_t *counts, int num_threads, Plan &plan);
void fill_plan(const Model &model, const Batch &batch, const int32_t *counts, Plan &plan);

// The floats of scratch memory that each thread needs.
int64_t attention_scratch(const Model &model);

// Where rows of queries and of the result lie, from row to row.
struct AttentionRows {
    const float *queries;
    int64_t query_stride;
    float *out;
    int64_t out_stride;
    float scale;  // of the scores
};

// The pieces of a layer's work, which threads may do in any order, and some of them: `scratch` is the thread's own.
int64_t num_attention_pieces(const Model &model, const Plan &plan);
void attend_pieces(const Model &model, const Batch &batch, int64_t layer, const Plan &plan, const AttentionRows &rows,
                   int64_t first, int64_t last, float *scratch);

// To be called by all threads of a team. `qkv` and `out` are rows of the batch, `scratch` is the thread's own.
void attend(Team &team, const Model &model, const Batch &batch, int64_t layer, const Plan &plan, const float *qkv,
            int64_t qkv_stride, float *out, int64_t out_stride, float *scratch);

}  // namespace gea
