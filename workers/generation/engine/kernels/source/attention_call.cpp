// Attention alone, for models whose other layers run elsewhere: native_attention.py calls it once for each layer.
//
// The threads may be lent by an OpenMP runtime, whose own would otherwise spin for the cores that ours need.
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "attention.h"
#include "attention_plan.h"
#include "batch.h"
#include "export.h"
#include "gemm.h"
#include "rows.h"

namespace gea {
namespace {

constexpr int64_t MOST_OWN_ROWS = 4;    // rows, and below rows times heads times partitions, that one thread is as fast
constexpr int64_t MOST_OWN_COST = 24;   // with as several

using Parallel = void (*)(void (*body)(void *), void *context, unsigned num_threads, unsigned flags);  // GOMP_parallel

// One layer's rows as native_attention.py has them: heads side by side, strides in numbers from row to row.
struct LayerCall {
    const float *queries, *keys, *values;
    float *out;
    int64_t query_stride, key_stride, value_stride, out_stride;
    double scale;
};

class Attention {
  public:
    Attention(const Model &model, Parallel parallel, int num_threads)
        : model_(model), layers_(model.layers, model.layers + model.num_layers), parallel_(parallel),
          num_threads_(num_threads), stride_(round_up(attention_scratch(model), LINE)),
          scratch_(size_t(num_threads * stride_)) {
        model_.layers = layers_.data();
    }

    bool start_threads() {
        if (parallel_ == nullptr) team_.reset(Team::create(num_threads_));
        return parallel_ != nullptr || team_ != nullptr;
    }

    // The arrays of `batch` stay with the caller, until the next one.
    int begin(const Batch &batch) {
        batch_ = batch;
        if (int error = check_places(model_, batch_)) return error;
        measure_plan(model_, batch_, batch_.lengths, num_threads_, plan_);
        tiles_.resize(size_t(plan_.num_tiles));
        tasks_.resize(size_t(plan_.num_tasks));
        partials_.resize(size_t(plan_.num_partials));
        pending_.reset(new std::atomic<int32_t>[size_t(plan_.num_tiles * model_.num_kv_heads)]);
        plan_.tiles = tiles_.data(), plan_.tasks = tasks_.data();
        plan_.partials = partials_.data(), plan_.pending = pending_.get();
        fill_plan(model_, batch_, batch_.lengths, plan_);
        places_.resize(size_t(batch_.num_rows));
        place_rows(model_, batch_, places_.data());
        are_rows_alone_ = plan_.num_tasks == batch_.num_segments;
        return OK;
    }

    void run(int64_t layer, const LayerCall &call) {
        if (!are_rows_alone_) {
            share(batch_.num_rows, batch_.num_rows > MOST_OWN_ROWS, [&](int64_t row, float *) {
                write(layer, call, row, 0, model_.num_kv_heads);
            });
        }
        const AttentionRows rows{call.queries, call.query_stride, call.out, call.out_stride, float(call.scale)};
        share(num_attention_pieces(model_, plan_), cost() > MOST_OWN_COST, [&](int64_t piece, float *scratch) {
            if (are_rows_alone_) write_piece(layer, call, piece_at(model_, plan_, piece));
            attend_pieces(model_, batch_, layer, plan_, rows, piece, piece + 1, scratch);
        });
    }

  private:
    int64_t cost() const {
        int64_t total = 0;
        for (const Tile &tile : tiles_) total += tile.num_rows * ceil_div(tile.position + tile.num_rows, PARTITION);
        return total * model_.num_heads;
    }

    // Writes what nobody but the piece itself will read.
    void write_piece(int64_t layer, const LayerCall &call, const Piece &piece) const {
        const Tile &tile = tiles_[size_t(tasks_[size_t(piece.task)].tile)];
        for (int64_t row = tile.first_row; row < tile.first_row + tile.num_rows; row++) {
            write(layer, call, row, piece.first_head, piece.last_head);
        }
    }

    void write(int64_t layer, const LayerCall &call, int64_t row, int64_t first_head, int64_t last_head) const {
        const Place &place = places_[size_t(row)];
        const int64_t first = (layer * model_.num_blocks + place.block) * model_.num_kv_heads;
        for (int64_t head = first_head; head < last_head; head++) {
            write_entry(model_, first + head, place.offset, call.keys + row * call.key_stride + head * model_.head_dim,
                        call.values + row * call.value_stride + head * model_.head_dim);
        }
    }

    // Calls body(i, scratch of the thread) for all i below `count`, on several threads if that `is_worthwhile`.
    template <class Body>
    void share(int64_t count, bool is_worthwhile, Body &&body) {
        std::atomic<int64_t> next{0};
        std::atomic<int> num_joined{0};
        auto work = [&] {
            const int thread = num_joined.fetch_add(1, std::memory_order_relaxed);
            if (thread >= num_threads_) return;
            for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) {
                body(i, scratch_.data() + thread * stride_);
            }
        };
        if (!is_worthwhile || num_threads_ == 1) {
            work();
        } else if (parallel_ != nullptr) {
            parallel_([](void *context) { (*static_cast<decltype(work) *>(context))(); }, &work, num_threads_, 0);
        } else {
            auto own = [&](int) { work(); };
            team_->run(own);
        }
    }

    Model model_;
    const std::vector<Layer> layers_;
    const Parallel parallel_;
    const int num_threads_;
    const int64_t stride_;
    std::vector<float> scratch_;
    std::unique_ptr<Team> team_;
    Batch batch_{};
    Plan plan_{};
    bool are_rows_alone_ = false;  // each segment is one task, so that it may write its keys and values itself
    std::vector<Tile> tiles_;
    std::vector<Task> tasks_;
    std::vector<float> partials_;
    std::vector<Place> places_;
    std::unique_ptr<std::atomic<int32_t>[]> pending_;
};

}  // namespace
}  // namespace gea

using namespace gea;

// Returns attention over the cache that `model` names, of which nothing else is read but the numbers of its heads and
// the windows of its layers; null where memory or threads are short. `parallel` is GOMP_parallel, or null.
GEA_EXPORT void *gea_attention_create(const Model *model, void *parallel, int64_t num_threads) try {
    const int threads = int(std::clamp<int64_t>(num_threads, 1, MAX_THREADS));
    auto attention = std::make_unique<Attention>(*model, reinterpret_cast<Parallel>(parallel), threads);
    return attention->start_threads() ? attention.release() : nullptr;
} catch (const std::bad_alloc &) {
    return nullptr;
}

// Says which rows come next, for all layers; returns an Error.
GEA_EXPORT int gea_attention_begin(void *attention, const Batch *batch) try {
    return static_cast<Attention *>(attention)->begin(*batch);
} catch (const std::bad_alloc &) {
    return OUT_OF_MEMORY;
}

// Writes the rows' keys and values, then attends from their queries. One call at a time.
GEA_EXPORT void gea_attention_run(void *attention, int64_t layer, const LayerCall *call) {
    static_cast<Attention *>(attention)->run(layer, *call);
}

GEA_EXPORT void gea_attention_destroy(void *attention) { delete static_cast<Attention *>(attention); }
