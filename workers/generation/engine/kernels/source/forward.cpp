// The forward pass of the Llama family over one step's batch, from token ids to logits, on all threads of a team.
#include "attention.h"
#include "batch.h"
#include "export.h"
#include "gemm.h"
#include "model.h"
#include "quantize.h"
#include "rows.h"
#include "scratch.h"
#include "threads.h"

namespace gea {
namespace {

// With so few rows each thread prepares them all for itself: cheaper than to wait for each other.
constexpr int64_t MOST_OWN_ROWS = 2;

// Rows ready for a product: one array for all threads, or one for each.
struct Prepared {
    float *floats;
    uint8_t *bytes;
    float *scales;
};

// The arrays of one step.
struct Arrays {
    Place *places;         // (num_rows,)
    int32_t *wanted;       // (num_logits,) rows whose logits are wanted
    float *hidden;         // (num_rows, hidden)
    float *qkv;            // (num_rows, query, key and value)
    float *mixed;          // (num_rows, num_heads head_dim)
    float *last_hidden;    // (num_logits, hidden), where not all rows are wanted
    float *last_mixed;
    float *gated;          // (num_rows, intermediate)
    float *floats;         // (threads or 1, rows, hidden): see Prepared
    uint8_t *bytes;
    float *scales;
    float *attention;      // (threads, attention_scratch)
    Plan all, last;        // what attends in all layers but the last, and there
};

// A model with its threads and its memory.
struct Engine {
    Model model;
    Team *team;
    Scratch scratch;
};

// One call of the forward pass.
class Step {
  public:
    Step(Engine &engine, const Batch &batch)
        : model_(engine.model), team_(*engine.team), scratch_(engine.scratch), batch_(batch) {}

    int run() {
        if (int error = check_batch(model_, batch_)) return error;
        if (int error = prepare()) return error;
        auto body = [this](int thread) { forward(thread); };
        team_.run(body);
        return OK;
    }

  private:
    // ---- Preparation, by the calling thread ----

    int prepare() {
        measure_plan(model_, batch_, batch_.lengths, team_.size(), arrays_.all);
        measure_plan(model_, batch_, batch_.logits, team_.size(), arrays_.last);
        if (!scratch_.reserve(cut(nullptr))) return OUT_OF_MEMORY;
        cut(scratch_.bytes());
        fill_plan(model_, batch_, batch_.lengths, arrays_.all);
        fill_plan(model_, batch_, batch_.logits, arrays_.last);
        place_rows(model_, batch_, arrays_.places);
        list_wanted(batch_, arrays_.wanted);
        return OK;
    }

    int64_t cut(uint8_t *bytes) {
        const int64_t rows = batch_.num_rows, logits = batch_.num_logits, threads = team_.size();
        const int64_t picked = picks_rows() ? logits : 0;
        const int64_t prepared = std::max(rows, threads * MOST_OWN_ROWS);
        Cutter cutter(bytes);
        cutter.cut(arrays_.places, rows);
        cutter.cut(arrays_.wanted, logits);
        cutter.cut(arrays_.hidden, rows * model_.hidden_size);
        cutter.cut(arrays_.qkv, rows * qkv_width());
        cutter.cut(arrays_.mixed, rows * mixed_width());
        cutter.cut(arrays_.last_hidden, picked * model_.hidden_size);
        cutter.cut(arrays_.last_mixed, picked * mixed_width());
        cutter.cut(arrays_.gated, rows * model_.intermediate_size);
        cutter.cut(arrays_.floats, prepared * round_up(model_.hidden_size, ROW_ALIGN));
        cutter.cut(arrays_.bytes, is_int8() ? prepared * widest() : 0);
        cutter.cut(arrays_.scales, is_int8() ? prepared * widest() / GROUP : 0);
        cutter.cut(arrays_.attention, threads * attention_stride());
        for (Plan *plan : {&arrays_.all, &arrays_.last}) {
            cutter.cut(plan->tiles, plan->num_tiles);
            cutter.cut(plan->tasks, plan->num_tasks);
            cutter.cut(plan->pending, plan->num_tiles * model_.num_kv_heads);
            cutter.cut(plan->partials, plan->num_partials);
        }
        return cutter.size();
    }

    // ---- The pass itself, by every thread ----

    void forward(int thread) {
        int64_t num_rows = batch_.num_rows;
        float *hidden = arrays_.hidden, *mixed = arrays_.mixed;
        embed();
        for (int64_t number = 0; number < model_.num_layers; number++) {
            const Layer &layer = model_.layers[number];
            const bool is_last = number == model_.num_layers - 1;
            product(layer.qkv, layer.qkv_bias, qkv_width(), norm(thread, hidden, num_rows, layer.attention_norm),
                    model_.hidden_size, arrays_.qkv, Finish::STORE);
            place_heads(number);
            attend(team_, model_, batch_, number, is_last ? arrays_.last : arrays_.all, arrays_.qkv, qkv_width(), mixed,
                   mixed_width(), arrays_.attention + thread * attention_stride());
            if (is_last && picks_rows()) {
                pick_wanted();
                num_rows = batch_.num_logits, hidden = arrays_.last_hidden, mixed = arrays_.last_mixed;
                if (num_rows == 0) return;
            }
            product(layer.out, layer.out_bias, model_.hidden_size, take(thread, mixed, num_rows, mixed_width()),
                    mixed_width(), hidden, Finish::ADD);
            product(layer.gate_up, layer.gate_up_bias, model_.intermediate_size,
                    norm(thread, hidden, num_rows, layer.mlp_norm), model_.hidden_size, arrays_.gated, Finish::GATE);
            product(layer.down, layer.down_bias, model_.hidden_size,
                    take(thread, arrays_.gated, num_rows, model_.intermediate_size), model_.intermediate_size, hidden,
                    Finish::ADD);
        }
        product(model_.head, nullptr, model_.vocab_size, norm(thread, hidden, num_rows, model_.final_norm),
                model_.hidden_size, batch_.out, Finish::STORE);
    }

    void embed() {
        const Matrix embedding{model_.embedding, format(), model_.vocab_size, model_.hidden_size};
        team_.share(batch_.num_rows, batch_.num_rows, [&](int64_t first, int64_t last) {
            for (int64_t row = first; row < last; row++) {
                read_row(embedding, batch_.token_ids[row], arrays_.hidden + row * model_.hidden_size);
            }
        });
    }

    void place_heads(int64_t layer) {
        const int64_t heads = model_.num_heads + model_.num_kv_heads, count = batch_.num_rows * heads;
        team_.share(count, count, [&](int64_t first, int64_t last) {
            for (int64_t i = first; i < last; i++) {
                place_head(model_, layer, arrays_.places[i / heads], arrays_.qkv + i / heads * qkv_width(), i % heads);
            }
        });
    }

    // Only rows whose logits are wanted go on behind the last keys and values.
    void pick_wanted() {
        const int64_t count = batch_.num_logits;
        team_.share(count, count, [&](int64_t first, int64_t last) {
            for (int64_t i = first; i < last; i++) {
                const int64_t row = arrays_.wanted[i], hidden = model_.hidden_size, mixed = mixed_width();
                memcpy(arrays_.last_hidden + i * hidden, arrays_.hidden + row * hidden, hidden * sizeof(float));
                memcpy(arrays_.last_mixed + i * mixed, arrays_.mixed + row * mixed, mixed * sizeof(float));
            }
        });
    }

    void product(const uint8_t *panels, const float *bias, int64_t outputs, const Rows &rows, int64_t inputs, float *out,
                 Finish finish) {
        multiply(team_, Matrix{panels, format(), outputs, inputs}, rows,
                 Output{out, outputs, bias, finish});
    }

    // Returns the rows, normed, as a product wants them.
    Rows norm(int thread, const float *from, int64_t num_rows, const float *weight) {
        const int64_t width = model_.hidden_size, stride = round_up(width, ROW_ALIGN);
        const Prepared to = room(thread, num_rows);
        for_rows(num_rows, [&](int64_t row) {
            float *floats = to.floats + row * stride;
            rms_norm(from + row * width, weight, width, float(model_.norm_eps), floats);
            if (is_int8()) quantize(to, row, floats, width);
        });
        return {num_rows, stride, to.floats, to.bytes, to.scales};
    }

    // Returns the rows as a product wants them.
    Rows take(int thread, const float *from, int64_t num_rows, int64_t width) {
        if (!is_int8()) return {num_rows, width, from, nullptr, nullptr};
        const int64_t stride = round_up(width, ROW_ALIGN);
        const Prepared to = room(thread, num_rows);
        for_rows(num_rows, [&](int64_t row) { quantize(to, row, from + row * width, width); });
        return {num_rows, stride, nullptr, to.bytes, to.scales};
    }

    static void quantize(const Prepared &to, int64_t row, const float *from, int64_t width) {
        const int64_t stride = round_up(width, ROW_ALIGN);
        quantize_row(from, width, to.bytes + row * stride, to.scales + row * (stride / GROUP));
    }

    Prepared room(int thread, int64_t num_rows) const {
        const int64_t first = num_rows > MOST_OWN_ROWS ? 0 : thread * MOST_OWN_ROWS;
        return {arrays_.floats + first * round_up(model_.hidden_size, ROW_ALIGN), arrays_.bytes + first * widest(),
                arrays_.scales + first * (widest() / GROUP)};
    }

    template <class Body>
    void for_rows(int64_t num_rows, Body &&body) {
        if (num_rows <= MOST_OWN_ROWS) {
            for (int64_t row = 0; row < num_rows; row++) body(row);
            return;
        }
        team_.share(num_rows, num_rows, [&](int64_t first, int64_t last) {
            for (int64_t row = first; row < last; row++) body(row);
        });
    }

    // ---- Sizes ----

    Format format() const { return Format(model_.weight_format); }
    bool is_int8() const { return format() == Format::INT8; }
    bool picks_rows() const { return batch_.num_logits < batch_.num_rows; }
    int64_t mixed_width() const { return model_.num_heads * model_.head_dim; }
    int64_t qkv_width() const { return (model_.num_heads + 2 * model_.num_kv_heads) * model_.head_dim; }
    int64_t attention_stride() const { return round_up(attention_scratch(model_), ALIGNMENT); }
    int64_t widest() const {
        const int64_t most = std::max(model_.hidden_size, std::max(model_.intermediate_size, mixed_width()));
        return round_up(most, ROW_ALIGN);
    }

    const Model &model_;
    Team &team_;
    Scratch &scratch_;
    const Batch &batch_;
    Arrays arrays_{};
};

}  // namespace
}  // namespace gea

using namespace gea;

// Returns a model that runs on `num_threads`, the caller's among them; null where memory or threads are short.
GEA_EXPORT void *gea_model_create(const Model *model, int64_t num_threads) {
    Engine *engine = new (std::nothrow) Engine{*model, nullptr, {}};
    if (engine == nullptr) return nullptr;
    engine->team = Team::create(int(num_threads));
    if (engine->team != nullptr) return engine;
    delete engine;
    return nullptr;
}

// Runs a batch and writes its logits; returns an Error. One call at a time.
GEA_EXPORT int gea_model_forward(void *engine, const Batch *batch) {
    return Step(*static_cast<Engine *>(engine), *batch).run();
}

// The bytes of memory that the batches so far have needed.
GEA_EXPORT int64_t gea_model_activation_bytes(void *engine) { return static_cast<Engine *>(engine)->scratch.capacity(); }

GEA_EXPORT void gea_model_destroy(void *engine) {
    delete static_cast<Engine *>(engine)->team;
    delete static_cast<Engine *>(engine);
}
