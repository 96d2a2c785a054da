// Draws one token for each row of logits, row by row on all threads of a team: what draw.py does, the same tokens.
#include "sample.h"

#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "export.h"
#include "sample_filter.h"
#include "sample_race.h"
#include "sample_scores.h"
#include "sample_weight.h"
#include "threads.h"

namespace gea {
namespace {

constexpr int NOT_FINITE = -1, NOTHING_ALLOWED = -2;  // as in kernels/sampling.py
constexpr int64_t MIN_SHARED_FLOATS = 200'000;  // fewer logits are done before another thread is awake

struct Scratch {
    std::unique_ptr<float[]> scores;
    std::vector<Token> tokens;
};

int32_t draw_row(const float *logits, int64_t count, const Settings &row, int64_t position, const int32_t *mask,
                 Scratch &scratch) {
    if (!is_finite(logits, count)) return NOT_FINITE;
    const bool is_changed = mask != nullptr || row.num_seen + row.num_counted + row.num_bias > 0;
    float *scores = scratch.scores.get();
    if (is_changed) {
        memcpy(scores, logits, size_t(count) * sizeof(float));
        penalize(scores, row);
        if (mask != nullptr) forbid(scores, mask, count);
    }
    const float *from = is_changed ? scores : logits;
    const float most = greatest(from, count);
    if (most == -INF) return NOTHING_ALLOWED;
    const int32_t likeliest = first_of(from, count, most);
    if (row.is_greedy) return likeliest;
    for (int64_t i = 0; i < count; i++) scores[i] = (from[i] - most) / row.temperature;
    const uint64_t key = draw_key(row.seed, row.index, uint64_t(position));
    if (row.top_k <= 0 && row.top_p >= 1.0 && row.min_log == -INF) return draw_from_all(scores, count, likeliest, key);
    filter(scores, count, row, scratch.tokens);
    return draw_from(scratch.tokens, key);
}

struct Sampler {
    Team *team;
    std::vector<Scratch> scratch;  // of each thread
    int64_t capacity = 0;          // of `scores`

    bool reserve(int64_t count) {
        if (count <= capacity) return true;
        for (Scratch &each : scratch) {
            each.scores.reset(new (std::nothrow) float[size_t(count)]);
            each.tokens.reserve(size_t(count));
            if (!each.scores) return capacity = 0, false;
        }
        capacity = count;
        return true;
    }
};

}  // namespace
}  // namespace gea

GEA_EXPORT void *gea_sampler_create(int num_threads) try {
    gea::Team *team = gea::Team::create(num_threads);
    if (team == nullptr) return nullptr;
    auto *sampler = new gea::Sampler{team, {}, 0};
    sampler->scratch.resize(size_t(team->size()));
    return sampler;
} catch (const std::bad_alloc &) {
    return nullptr;
}

// Draw token_ids `(num_rows,)` from logits `(num_rows, count)`; -1 for a row that is not finite, -2 for one whose mask
// allows nothing. One caller at a time.
GEA_EXPORT int gea_sample(void *sampler, const float *logits, int64_t num_rows, int64_t count,
                          const gea::Settings *const *settings, const int64_t *positions, const int32_t *const *masks,
                          int32_t *token_ids) try {
    using namespace gea;
    auto &all = *static_cast<Sampler *>(sampler);
    if (!all.reserve(count)) return OUT_OF_MEMORY;
    auto draw = [&](int thread, int64_t row) {
        token_ids[row] = draw_row(logits + row * count, count, *settings[row], positions[row], masks[row],
                                  all.scratch[size_t(thread)]);
    };
    if (num_rows * count < MIN_SHARED_FLOATS || num_rows == 1) {
        for (int64_t row = 0; row < num_rows; row++) draw(0, row);
        return OK;
    }
    auto body = [&](int thread) {
        all.team->share(num_rows, 1, [&](int64_t first, int64_t last) {
            for (int64_t row = first; row < last; row++) draw(thread, row);
        });
    };
    all.team->run(body);
    return OK;
} catch (const std::bad_alloc &) {
    return gea::OUT_OF_MEMORY;
}
