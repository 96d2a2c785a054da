// How the attention of a step is cut into tiles and tasks.
#include "attention_plan.h"

#include "attention_part.h"

namespace gea {
namespace {

constexpr int64_t PIECES_PER_THREAD = 8;  // fewer would leave threads idle at the end of a layer

// Calls body(segment, first row of the batch, number of rows, position of the first) for every tile.
template <class Body>
void for_attention_tiles(const Model &model, const Batch &batch, const int32_t *counts, Body &&body) {
    const int64_t height = rows_per_tile(model);
    int64_t row = 0;
    for (int64_t segment = 0; segment < batch.num_segments; segment++) {
        const int64_t length = batch.lengths[segment];
        for (int64_t i = length - counts[segment]; i < length; i += height) {
            body(segment, row + i, std::min(height, length - i), batch.starts[segment] + i);
        }
        row += length;
    }
}

int64_t num_parts(int64_t position, int64_t num_rows) { return (position + num_rows - 1) / PARTITION + 1; }

int64_t heads_at_once(const Model &model, int64_t num_tasks, int64_t most_rows, int num_threads) {
    const int64_t fitting = heads_per_tile(model) / (std::max<int64_t>(1, most_rows) * group_size(model));
    const int64_t sharing = num_tasks * model.num_kv_heads / (PIECES_PER_THREAD * num_threads);
    return std::clamp<int64_t>(num_threads > 1 ? std::min(fitting, sharing) : fitting, 1, model.num_kv_heads);
}

}  // namespace

void measure_plan(const Model &model, const Batch &batch, const int32_t *counts, int num_threads, Plan &plan) {
    plan.num_tiles = plan.num_tasks = plan.num_partials = 0;
    int64_t cost = 0, most_rows = 0;
    for_attention_tiles(model, batch, counts, [&](int64_t, int64_t, int64_t num_rows, int64_t position) {
        cost += num_rows * num_parts(position, num_rows) * model.num_kv_heads;
        most_rows = std::max(most_rows, num_rows);
    });
    // A task that is a large share of all would leave the other threads idle at the end.
    plan.most_cost = cost / (4 * num_threads);
    for_attention_tiles(model, batch, counts, [&](int64_t, int64_t, int64_t num_rows, int64_t position) {
        const int64_t parts = num_parts(position, num_rows), heads = num_rows * group_size(model);
        const bool is_split = parts > 1 && num_threads > 1 && num_rows * parts > plan.most_cost;
        plan.num_tiles++;
        plan.num_tasks += is_split ? parts : 1;
        if (is_split) plan.num_partials += model.num_kv_heads * parts * Partial::size(heads, model.head_dim);
    });
    plan.is_split = num_threads > 1;
    plan.heads_at_once = heads_at_once(model, plan.num_tasks, most_rows, num_threads);
}

void fill_plan(const Model &model, const Batch &batch, const int32_t *counts, Plan &plan) {
    int32_t num_tiles = 0;
    int64_t num_tasks = 0, partials = 0;
    for_attention_tiles(model, batch, counts, [&](int64_t segment, int64_t row, int64_t num_rows, int64_t position) {
        const int64_t parts = num_parts(position, num_rows), heads = num_rows * group_size(model);
        const bool is_split = parts > 1 && plan.is_split && num_rows * parts > plan.most_cost;
        Tile &tile = plan.tiles[num_tiles];
        tile = {int32_t(segment), int32_t(row), int32_t(num_rows), int32_t(position), is_split ? int32_t(parts) : 1,
                partials};
        if (is_split) partials += model.num_kv_heads * parts * Partial::size(heads, model.head_dim);
        for (int64_t head = 0; head < model.num_kv_heads; head++) {
            new (&plan.pending[num_tiles * model.num_kv_heads + head]) std::atomic<int32_t>(tile.num_parts);
        }
        for (int32_t part = 0; part < tile.num_parts; part++) plan.tasks[num_tasks++] = {num_tiles, part};
        num_tiles++;
    });
    // The largest first, so that all threads end together.
    const auto cost = [&](const Task &task) {
        const Tile &tile = plan.tiles[task.tile];
        return tile.num_parts > 1 ? int64_t(tile.num_rows) : tile.num_rows * num_parts(tile.position, tile.num_rows);
    };
    std::sort(plan.tasks, plan.tasks + plan.num_tasks, [&](const Task &a, const Task &b) {
        const int64_t first = cost(a), second = cost(b);
        if (first != second) return first > second;
        return a.tile != b.tile ? a.tile < b.tile : a.part < b.part;
    });
}

}  // namespace gea
