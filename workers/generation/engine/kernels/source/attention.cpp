#include "attention.h"

#include <cmath>

#include "gemm.h"
#include "vector.h"

namespace gea {
namespace {

constexpr int64_t TILE_HEADS = 48;  // rows times heads of a group: their scores and queries are 36 KB
constexpr int MAX_SUMS = 12;        // vectors that fit the registers beside what they are made of
constexpr int MAX_LOW_ROWS = 3;     // so few rows leave room for twice as many columns, and need them to hide latency
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

int64_t group_size(const Model &model) { return model.num_heads / model.num_kv_heads; }
int64_t rows_per_tile(const Model &model) { return std::max<int64_t>(1, TILE_HEADS / group_size(model)); }
int64_t heads_per_tile(const Model &model) { return rows_per_tile(model) * group_size(model); }

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

// One task's view of its rows: what each of them sees within a partition.
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

// Scores of `VECTORS` times 8 positions from `i` on.
template <int VECTORS, class T>
void score_columns(const View<T> &view, const Sight &sight, int64_t i, const float *queries, int64_t num_heads,
                   float *scores) {
    const T *columns[VECTORS];
    for (int v = 0; v < VECTORS; v++) {  // what lies behind the last position is not looked at
        columns[v] = v == 0 || i + v * WIDTH < sight.stop ? view.key(sight.begin + i + v * WIDTH) : columns[v - 1];
    }
    for_tiles(0, num_heads, [&](int64_t top, auto num_rows) {
        constexpr int ROWS = decltype(num_rows)::value;
        if constexpr (ROWS * VECTORS <= MAX_SUMS) {
            Sums<ROWS, VECTORS> sums;
            sums.add(queries + top * view.head_dim, view.head_dim, columns, view.block_size, view.head_dim);
            sums.write(scores + top * PARTITION + i, PARTITION);
        }
    });
}

template <class T>
void score(const View<T> &view, const Sight &sight, const float *queries, int64_t num_heads, float *scores) {
    const bool is_low = num_heads <= MAX_LOW_ROWS;
    const int64_t step = is_low ? 4 * WIDTH : 2 * WIDTH;
    for (int64_t i = sight.start / step * step; i < sight.stop; i += step) {
        if (is_low) {
            score_columns<4>(view, sight, i, queries, num_heads, scores);
        } else {
            score_columns<2>(view, sight, i, queries, num_heads, scores);
        }
    }
}

// Scales of the positions of a partition, for 8-bit numbers.
void gather_scales(const View<int8_t> &view, const Sight &sight, float *key_scales, float *value_scales) {
    for (int64_t i = sight.start / WIDTH * WIDTH; i < sight.stop; i += WIDTH) {
        const int64_t slot = view.slot(sight.begin + i);
        store(key_scales + i, load(view.key_scales + slot));
        store(value_scales + i, load(view.value_scales + slot));
    }
}

// Turns the scores of one row and head into weights, zero where it sees nothing.
void weigh(float *scores, const Sight &sight, int64_t head, const float *key_scales, const float *value_scales,
           float *most, float *total) {
    const int64_t from = sight.start / PANEL * PANEL, to = round_up(sight.stop, PANEL);
    const int64_t first = sight.first(head), last = sight.last(head);
    *most = NOTHING, *total = 0.0f;
    if (first >= last) {
        std::fill(scores + from, scores + to, 0.0f);
        return;
    }
    const int64_t lower = first / WIDTH * WIDTH, upper = round_up(last, WIDTH);
    if (key_scales != nullptr) {
        for (int64_t i = lower; i < upper; i += WIDTH) store(scores + i, load(scores + i) * load(key_scales + i));
    }
    std::fill(scores + lower, scores + first, NOTHING);
    std::fill(scores + last, scores + upper, NOTHING);
    Floats peak = splat(NOTHING), sums = {};
    for (int64_t i = lower; i < upper; i += WIDTH) peak = max(peak, load(scores + i));
    *most = largest(peak);
    for (int64_t i = lower; i < upper; i += WIDTH) store(scores + i, exp(load(scores + i) - splat(*most)));
    std::fill(scores + from, scores + first, 0.0f);
    std::fill(scores + last, scores + to, 0.0f);
    for (int64_t i = lower; i < upper; i += WIDTH) sums += load(scores + i);
    *total = sum(sums);
    if (value_scales != nullptr) {
        for (int64_t i = lower; i < upper; i += WIDTH) store(scores + i, load(scores + i) * load(value_scales + i));
    }
}

// Weighted sums of `VECTORS` times 8 columns of the values.
template <int VECTORS, class T>
void mix_columns(const View<T> &view, const Sight &sight, const float *weights, int64_t num_heads, int64_t column,
                 float *out) {
    for_tiles(0, num_heads, [&](int64_t top, auto num_rows) {
        constexpr int ROWS = decltype(num_rows)::value;
        if constexpr (ROWS * VECTORS <= MAX_SUMS) {
            Sums<ROWS, VECTORS> sums;
            const int64_t last = sight.last(top + ROWS - 1);
            for (int64_t i = sight.first(top), end; i < last; i = end) {
                end = std::min(last, i + view.block_size - (sight.begin + i) % view.block_size);
                const T *value = view.value(sight.begin + i) + column, *columns[VECTORS];
                for (int v = 0; v < VECTORS; v++) columns[v] = value + v * WIDTH;
                sums.add(weights + top * PARTITION + i, PARTITION, columns, view.head_dim, end - i);
            }
            sums.write(out + top * view.head_dim + column, view.head_dim);
        }
    });
}

template <class T>
void mix(const View<T> &view, const Sight &sight, const float *weights, int64_t num_heads, float *sums) {
    int64_t column = 0;
    for (; num_heads <= MAX_LOW_ROWS && column + 4 * WIDTH <= view.head_dim; column += 4 * WIDTH) {
        mix_columns<4>(view, sight, weights, num_heads, column, sums);
    }
    for (; column + 2 * WIDTH <= view.head_dim; column += 2 * WIDTH) {
        mix_columns<2>(view, sight, weights, num_heads, column, sums);
    }
    if (column < view.head_dim) mix_columns<1>(view, sight, weights, num_heads, column, sums);
}

template <class T>
void attend_part(const View<T> &view, const Sight &sight, const float *queries, int64_t num_heads, float *scores,
                 const Partial &out) {
    alignas(32) float scales[2 * PARTITION];
    float *key_scales = nullptr, *value_scales = nullptr;
    if constexpr (std::is_same_v<T, int8_t>) {
        key_scales = scales, value_scales = scales + PARTITION;
        gather_scales(view, sight, key_scales, value_scales);
    }
    score(view, sight, queries, num_heads, scores);
    for (int64_t head = 0; head < num_heads; head++) {
        weigh(scores + head * PARTITION, sight, head, key_scales, value_scales, out.most + head, out.total + head);
    }
    mix(view, sight, scores, num_heads, out.sums);
}

// Adds the next partition to what came before it.
void merge(const Partial &whole, const Partial &next, int64_t num_heads, int64_t head_dim) {
    for (int64_t head = 0; head < num_heads; head++) {
        if (next.most[head] == NOTHING) continue;
        const bool is_first = whole.most[head] == NOTHING;
        const float most = is_first ? next.most[head] : largest(whole.most[head], next.most[head]);
        const Floats old_share = is_first ? splat(0.0f) : exp(splat(whole.most[head] - most));
        const Floats new_share = exp(splat(next.most[head] - most));
        whole.total[head] = (is_first ? 0.0f : whole.total[head] * old_share[0]) + next.total[head] * new_share[0];
        whole.most[head] = most;
        float *sums = whole.sums + head * head_dim;
        const float *more = next.sums + head * head_dim;
        for (int64_t i = 0; i < head_dim; i += WIDTH) {
            const Floats old_sums = is_first ? splat(0.0f) : load(sums + i) * old_share;
            store(sums + i, fma(load(more + i), new_share, old_sums));
        }
    }
}

// What a thread works with at one layer.
struct Worker {
    const Model &model;
    const Batch &batch;
    const Plan &plan;
    int64_t layer;
    const float *qkv;
    int64_t qkv_stride;
    float *out;
    int64_t out_stride;
    float *scratch;

    template <class T>
    void work(const Task &task, int64_t kv_head) const {
        const Tile &tile = plan.tiles[task.tile];
        const int64_t group = group_size(model), dim = model.head_dim, num_heads = tile.num_rows * group;
        const int64_t window = model.layers[layer].window;
        float *queries = scratch, *scores = queries + num_heads * dim, *rest = scores + num_heads * PARTITION;
        const Partial whole = Partial::at(rest, num_heads, dim);
        const Partial next = Partial::at(rest + Partial::size(num_heads, dim), num_heads, dim);
        const View<T> view(model, batch, tile.segment, layer, kv_head);
        const int64_t lowest = Sight(tile, window, group, 0).lowest(0) / PARTITION;
        const int64_t highest = (tile.position + tile.num_rows - 1) / PARTITION;
        gather_queries(tile, kv_head, queries);
        if (tile.num_parts == 1) {
            std::fill(whole.most, whole.most + num_heads, NOTHING);
            for (int64_t part = lowest; part <= highest; part++) {
                attend_part(view, Sight(tile, window, group, part), queries, num_heads, scores, next);
                merge(whole, next, num_heads, dim);
            }
            write(tile, kv_head, whole);
            return;
        }
        const Partial own = partial(tile, kv_head, task.part);
        std::fill(own.most, own.most + num_heads, NOTHING);
        if (task.part >= lowest) attend_part(view, Sight(tile, window, group, task.part), queries, num_heads, scores, own);
        std::atomic<int32_t> &pending = plan.pending[task.tile * model.num_kv_heads + kv_head];
        if (pending.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
        pending.store(tile.num_parts, std::memory_order_relaxed);  // for the next layer
        std::fill(whole.most, whole.most + num_heads, NOTHING);
        for (int64_t part = 0; part < tile.num_parts; part++) merge(whole, partial(tile, kv_head, part), num_heads, dim);
        write(tile, kv_head, whole);
    }

    Partial partial(const Tile &tile, int64_t kv_head, int64_t part) const {
        const int64_t num_heads = tile.num_rows * group_size(model);
        const int64_t size = Partial::size(num_heads, model.head_dim);
        float *floats = plan.partials + tile.partials + (kv_head * tile.num_parts + part) * size;
        return Partial::at(floats, num_heads, model.head_dim);
    }

    void gather_queries(const Tile &tile, int64_t kv_head, float *queries) const {
        const int64_t width = group_size(model) * model.head_dim;
        const Floats scale = splat(1.0f / std::sqrt(float(model.head_dim)));
        for (int64_t row = 0; row < tile.num_rows; row++) {
            const float *from = qkv + (tile.first_row + row) * qkv_stride + kv_head * width;
            for (int64_t i = 0; i < width; i += WIDTH) store(queries + row * width + i, load(from + i) * scale);
        }
    }

    void write(const Tile &tile, int64_t kv_head, const Partial &whole) const {
        const int64_t group = group_size(model), dim = model.head_dim;
        for (int64_t head = 0; head < tile.num_rows * group; head++) {
            float *to = out + (tile.first_row + head / group) * out_stride + (kv_head * group + head % group) * dim;
            const Floats total = splat(whole.total[head]);
            for (int64_t i = 0; i < dim; i += WIDTH) store(to + i, load(whole.sums + head * dim + i) / total);
        }
    }
};

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

}  // namespace

int64_t attention_scratch(const Model &model) {
    const int64_t heads = heads_per_tile(model);
    return heads * (model.head_dim + PARTITION) + 2 * Partial::size(heads, model.head_dim);
}

void measure_plan(const Model &model, const Batch &batch, const int32_t *counts, int num_threads, Plan &plan) {
    plan.num_tiles = plan.num_tasks = plan.num_partials = 0;
    int64_t cost = 0;
    for_attention_tiles(model, batch, counts, [&](int64_t, int64_t, int64_t num_rows, int64_t position) {
        cost += num_rows * num_parts(position, num_rows) * model.num_kv_heads;
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

void attend(Team &team, const Model &model, const Batch &batch, int64_t layer, const Plan &plan, const float *qkv,
            int64_t qkv_stride, float *out, int64_t out_stride, float *scratch) {
    const Worker worker{model, batch, plan, layer, qkv, qkv_stride, out, out_stride, scratch};
    team.share(plan.num_tasks * model.num_kv_heads, 1, [&](int64_t first, int64_t) {
        const Task &task = plan.tasks[first / model.num_kv_heads];
        const int64_t head = first % model.num_kv_heads;
        switch (KVFormat(model.kv_format)) {
            case KVFormat::FP32: return worker.work<float>(task, head);
            case KVFormat::BF16: return worker.work<Bf16>(task, head);
            case KVFormat::FP16: return worker.work<Fp16>(task, head);
            case KVFormat::INT8: return worker.work<int8_t>(task, head);
        }
    });
}

}  // namespace gea
