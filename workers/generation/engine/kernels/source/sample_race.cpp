#include "sample_race.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "sample_weight.h"

namespace gea {
namespace {

constexpr int64_t BLOCK = 256;
constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15;

inline uint64_t mix(uint64_t value) {  // SplitMix64's finalizer
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB;
    return value ^ (value >> 31);
}

// The leader of a draw: the token with the greatest sum of value and noise so far.
class Race {
  public:
    explicit Race(uint64_t key) : key_(key) {}

    int32_t winner() const { return winner_; }

    // e^-best, with which a token's weight is the least 1 - u that can win: -log u >= 1 - u.
    double reach() const { return reach_; }

    uint64_t noise(int64_t id) const { return mix(key_ + (uint64_t(id) + 1) * GOLDEN); }

    void enter(int32_t id, float value, uint64_t noise) {
        const double uniform = (double(noise >> 11) + 0.5) / 0x1p53;
        const double sum = double(value) - std::log(-std::log(uniform));
        if (sum > best_) {
            best_ = sum;
            winner_ = id;
            reach_ = std::exp(-sum) * 1.001;
        }
    }

  private:
    const uint64_t key_;
    double best_ = -std::numeric_limits<double>::infinity();
    double reach_ = std::numeric_limits<double>::infinity();
    int32_t winner_ = -1;
};

}  // namespace

uint64_t draw_key(uint64_t seed, uint64_t index, uint64_t position) {
    return mix(mix(mix(GOLDEN + seed) + GOLDEN + index) + GOLDEN + position);
}

int32_t draw_from(const std::vector<Token> &tokens, uint64_t key) {
    Race race(key);
    for (const Token &token : tokens) {
        const uint64_t noise = race.noise(token.id);
        const double least = double(~noise >> 11) * 0x1p-53;  // at most 1 - u
        if (least <= token.weight * race.reach()) race.enter(token.id, token.value, noise);
    }
    return race.winner();
}

int32_t draw_from_all(const float *values, int64_t count, int32_t likeliest, uint64_t key) {
    Race race(key);
    race.enter(likeliest, values[likeliest], race.noise(likeliest));
    uint64_t noises[BLOCK];
    for (int64_t start = 0; start < count; start += BLOCK) {
        const int64_t size = std::min(BLOCK, count - start);
        const float *block = values + start;
        const float reach = float(std::min(race.reach() * 0x1p31, 1e30));
        int32_t can_win[BLOCK];
        int32_t found = 0;
        for (int64_t i = 0; i < size; i++) noises[i] = race.noise(start + i);
        for (int64_t i = 0; i < size; i++) {
            const float least = float(int32_t(uint32_t(~noises[i] >> 32) >> 1));  // of 1 - u, in 31 bits
            can_win[i] = least <= bound_of_weight(block[i]) * reach;
            found |= can_win[i];
        }
        if (!found) continue;
        for (int64_t i = 0; i < size; i++)
            if (can_win[i] && block[i] > -INF) race.enter(int32_t(start + i), block[i], noises[i]);
    }
    return race.winner();
}

}  // namespace gea
