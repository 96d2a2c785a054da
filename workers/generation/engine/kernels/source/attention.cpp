#include "attention.h"

#include <cmath>
#include <optional>

#include "attention_part.h"
#include "attention_plan.h"

namespace gea {
namespace {

constexpr int64_t MAX_PIECES = 4;  // in a row of one thread, each of which fetches what the next one begins with

// What a thread does of one layer: for each of its pieces, partition by partition, head by head.
template <class T>
class Worker {
  public:
    Worker(const Model &model, const Batch &batch, const Plan &plan, int64_t layer, const AttentionRows &rows,
           float *scratch)
        : model_(model), batch_(batch), plan_(plan), layer_(layer), rows_(rows), scratch_(scratch) {}

    void work(int64_t first, int64_t last) const {
        for (Unit unit = begin(first); unit.piece < last;) {
            if (is_first(unit)) start(unit);
            const Unit next = after(unit);
            const std::optional<Part<T>> ahead =
                next.piece < last ? std::optional<Part<T>>(part(next)) : std::nullopt;
            attend_at(unit, ahead ? &*ahead : nullptr);
            if (next.piece != unit.piece) finish(unit);
            unit = next;
        }
    }

  private:
    // One head and partition of a piece.
    struct Unit {
        int64_t piece, part, head;
    };

    // ---- The order of the work ----

    int64_t num_pieces() const { return num_attention_pieces(model_, plan_); }
    const Task &task(int64_t piece) const { return plan_.tasks[piece_at(model_, plan_, piece).task]; }
    const Tile &tile(int64_t piece) const { return plan_.tiles[task(piece).tile]; }
    int64_t first_head(int64_t piece) const { return piece_at(model_, plan_, piece).first_head; }
    int64_t last_head(int64_t piece) const { return piece_at(model_, plan_, piece).last_head; }
    int64_t num_heads(const Tile &tile) const { return tile.num_rows * group_size(model_); }

    int64_t lowest_part(const Tile &tile) const { return sight(tile, 0).lowest(0) / PARTITION; }
    int64_t first_part(int64_t piece) const {
        return tile(piece).num_parts > 1 ? task(piece).part : lowest_part(tile(piece));
    }
    int64_t last_part(int64_t piece) const {
        const Tile &own = tile(piece);
        return own.num_parts > 1 ? task(piece).part : (own.position + own.num_rows - 1) / PARTITION;
    }

    Unit begin(int64_t piece) const {
        return piece < num_pieces() ? Unit{piece, first_part(piece), first_head(piece)} : Unit{piece, 0, 0};
    }

    bool is_first(const Unit &unit) const {
        return unit.part == first_part(unit.piece) && unit.head == first_head(unit.piece);
    }

    Unit after(const Unit &unit) const {
        if (unit.head + 1 < last_head(unit.piece)) return {unit.piece, unit.part, unit.head + 1};
        if (unit.part < last_part(unit.piece)) return {unit.piece, unit.part + 1, first_head(unit.piece)};
        return begin(unit.piece + 1);
    }

    // ---- The work ----

    Sight sight(const Tile &tile, int64_t part) const {
        return Sight(tile, model_.layers[layer_].window, group_size(model_), part);
    }

    Part<T> part(const Unit &unit) const {
        const Tile &own = tile(unit.piece);
        return {View<T>(model_, batch_, own.segment, layer_, unit.head), sight(own, unit.part)};
    }

    void start(const Unit &unit) const {
        const Tile &own = tile(unit.piece);
        for (int64_t head = unit.head; head < last_head(unit.piece); head++) {
            gather_queries(own, head, queries(unit.piece, head));
            std::fill_n(whole(unit.piece, head).most, num_heads(own), NOTHING);
        }
    }

    void attend_at(const Unit &unit, const Part<T> *next) const {
        const Tile &own = tile(unit.piece);
        const int64_t heads = num_heads(own);
        const float *from = queries(unit.piece, unit.head);
        if (own.num_parts == 1) {
            attend_part(part(unit), next, from, heads, scores(), this->next(own));
            merge(whole(unit.piece, unit.head), this->next(own), heads, model_.head_dim);
            return;
        }
        const Partial out = partial(own, unit.head, unit.part);
        std::fill_n(out.most, heads, NOTHING);
        if (unit.part >= lowest_part(own)) attend_part(part(unit), next, from, heads, scores(), out);
    }

    void finish(const Unit &unit) const {
        const Tile &own = tile(unit.piece);
        for (int64_t head = first_head(unit.piece); head < last_head(unit.piece); head++) {
            if (own.num_parts > 1 && !gather_parts(unit.piece, head)) continue;
            write(own, head, whole(unit.piece, head));
        }
    }

    // Merges all partitions of a tile if this thread's was the last of them.
    bool gather_parts(int64_t piece, int64_t head) const {
        const Tile &own = tile(piece);
        std::atomic<int32_t> &pending = plan_.pending[task(piece).tile * model_.num_kv_heads + head];
        if (pending.fetch_sub(1, std::memory_order_acq_rel) > 1) return false;
        pending.store(own.num_parts, std::memory_order_relaxed);  // for the next layer
        for (int64_t part = 0; part < own.num_parts; part++) {
            merge(whole(piece, head), partial(own, head, part), num_heads(own), model_.head_dim);
        }
        return true;
    }

    void gather_queries(const Tile &tile, int64_t kv_head, float *to) const {
        const int64_t width = group_size(model_) * model_.head_dim;
        const Floats scale = splat(rows_.scale);
        for (int64_t row = 0; row < tile.num_rows; row++) {
            const float *from = rows_.queries + (tile.first_row + row) * rows_.query_stride + kv_head * width;
            for (int64_t i = 0; i < width; i += WIDTH) store(to + row * width + i, load(from + i) * scale);
        }
    }

    void write(const Tile &tile, int64_t kv_head, const Partial &whole) const {
        const int64_t group = group_size(model_), dim = model_.head_dim;
        for (int64_t head = 0; head < tile.num_rows * group; head++) {
            const int64_t row = tile.first_row + head / group, column = (kv_head * group + head % group) * dim;
            float *to = rows_.out + row * rows_.out_stride + column;
            const Floats total = splat(whole.total[head]);
            for (int64_t i = 0; i < dim; i += WIDTH) store(to + i, load(whole.sums + head * dim + i) / total);
        }
    }

    // ---- Memory: scores, one partition's result, then queries and results of all heads of a piece ----

    float *scores() const { return scratch_; }

    Partial next(const Tile &tile) const {
        return Partial::at(scratch_ + heads_per_tile(model_) * PARTITION, num_heads(tile), model_.head_dim);
    }

    float *queries(int64_t piece, int64_t head) const {
        float *all = scratch_ + heads_per_tile(model_) * PARTITION + whole_size();
        return all + (head - first_head(piece)) * num_heads(tile(piece)) * model_.head_dim;
    }

    Partial whole(int64_t piece, int64_t head) const {
        const int64_t heads = num_heads(tile(piece)), dim = model_.head_dim;
        float *all = scratch_ + heads_per_tile(model_) * (PARTITION + dim) + whole_size();
        return Partial::at(all + (head - first_head(piece)) * Partial::size(heads, dim), heads, dim);
    }

    int64_t whole_size() const { return Partial::size(heads_per_tile(model_), model_.head_dim); }

    Partial partial(const Tile &tile, int64_t kv_head, int64_t part) const {
        const int64_t heads = num_heads(tile), size = Partial::size(heads, model_.head_dim);
        float *floats = plan_.partials + tile.partials + (kv_head * tile.num_parts + part) * size;
        return Partial::at(floats, heads, model_.head_dim);
    }

    const Model &model_;
    const Batch &batch_;
    const Plan &plan_;
    const int64_t layer_;
    const AttentionRows &rows_;
    float *const scratch_;
};

}  // namespace

int64_t attention_scratch(const Model &model) {
    const int64_t heads = heads_per_tile(model);
    return heads * (model.head_dim + PARTITION) + 2 * Partial::size(heads, model.head_dim);
}

int64_t num_attention_pieces(const Model &model, const Plan &plan) {
    return plan.num_tasks * ((model.num_kv_heads + plan.heads_at_once - 1) / plan.heads_at_once);
}

void attend_pieces(const Model &model, const Batch &batch, int64_t layer, const Plan &plan, const AttentionRows &rows,
                   int64_t first, int64_t last, float *scratch) {
    const auto work = [&](auto number) {
        Worker<decltype(number)>(model, batch, plan, layer, rows, scratch).work(first, last);
    };
    switch (KVFormat(model.kv_format)) {
        case KVFormat::FP32: return work(float());
        case KVFormat::BF16: return work(Bf16());
        case KVFormat::FP16: return work(Fp16());
        case KVFormat::INT8: return work(int8_t());
    }
}

void attend(Team &team, const Model &model, const Batch &batch, int64_t layer, const Plan &plan, const float *qkv,
            int64_t qkv_stride, float *out, int64_t out_stride, float *scratch) {
    const AttentionRows rows{qkv, qkv_stride, out, out_stride, 1.0f / std::sqrt(float(model.head_dim))};
    team.share(num_attention_pieces(model, plan), MAX_PIECES, [&](int64_t first, int64_t last) {
        attend_pieces(model, batch, layer, plan, rows, first, last, scratch);
    });
}

}  // namespace gea
