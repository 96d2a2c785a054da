// Draws one token for each row of logits, row by row on all threads of a team: what draw.py does, the same tokens.
//
// Only few tokens can win a draw, so only few need exact noise. Weights are summed in doubles; ties go to the lowest id.
#include "sample.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <vector>

#include "export.h"
#include "threads.h"
#include "vector.h"

namespace gea {
namespace {

constexpr int NOT_FINITE = -1, NOTHING_ALLOWED = -2;  // as in kernels/sampling.py
constexpr int LANES = 32;
constexpr int64_t BLOCK = 256;
constexpr float INF = std::numeric_limits<float>::infinity();
constexpr float NO_WEIGHT = -50.0f;  // e^-50 of a million tokens is nothing in a double beside 1
constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15;
constexpr int64_t MIN_SHARED_FLOATS = 200'000;  // fewer logits are done before another thread is awake

typedef float Fours __attribute__((vector_size(16)));
typedef double Doubles __attribute__((vector_size(32)));
typedef uint64_t Longs __attribute__((vector_size(32)));

struct Token {
    float value;  // (logit - greatest) / temperature: at most 0
    int32_t id;
    double weight;
};

struct Scratch {
    std::unique_ptr<float[]> scores;
    std::vector<Token> tokens;
};

inline uint64_t mix(uint64_t value) {  // SplitMix64's finalizer
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB;
    return value ^ (value >> 31);
}

uint64_t draw_key(uint64_t seed, uint64_t index, uint64_t position) {
    return mix(mix(mix(GOLDEN + seed) + GOLDEN + index) + GOLDEN + position);
}

// e^x for -700 <= x <= 0, to the last bit or two: 2^k e^r with a series for e^r, which is returned; k is in the last bits
// of `shifted`.
inline double fused(double a, double b, double c) { return a * b + c; }

GEA_INLINE Doubles fused(Doubles a, Doubles b, double c) {
#ifdef __FMA__
    return Doubles(_mm256_fmadd_pd(__m256d(a), __m256d(b), _mm256_set1_pd(c)));
#else
    return a * b + c;
#endif
}

template <class T>
GEA_INLINE T series(T x, T &shifted) {
    const double shifter = 0x1.8p52;  // the sum's last bits are a whole number
    shifted = x * 1.4426950408889634 + shifter;
    const T k = shifted - shifter;
    const T r = (x - k * 0x1.62e42fefa0000p-1) - k * 0x1.cf79abc9e3b39p-40;
    T sum = r * (1.0 / 479001600.0) + 1.0 / 39916800.0;
    sum = fused(sum, r, 1.0 / 3628800.0);
    sum = fused(sum, r, 1.0 / 362880.0);
    sum = fused(sum, r, 1.0 / 40320.0);
    sum = fused(sum, r, 1.0 / 5040.0);
    sum = fused(sum, r, 1.0 / 720.0);
    sum = fused(sum, r, 1.0 / 120.0);
    sum = fused(sum, r, 1.0 / 24.0);
    sum = fused(sum, r, 1.0 / 6.0);
    sum = fused(sum, r, 0.5);
    sum = fused(sum, r, 1.0);
    sum = fused(sum, r, 1.0);
    return sum;
}

inline double exponential(double x) {
    double shifted;
    const double sum = series(x, shifted);
    return bit_cast<double>(bit_cast<uint64_t>(sum) + (bit_cast<uint64_t>(shifted) << 52));
}

GEA_INLINE Doubles exponential(Doubles x) {
    Doubles shifted;
    const Doubles sum = series(x, shifted);
    return Doubles(Longs(sum) + (Longs(shifted) << 52));
}

// The greatest of `count` numbers, none of which is NaN.
float greatest(const float *from, int64_t count) {
    float most[LANES];
    std::fill(most, most + LANES, -INF);
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int lane = 0; lane < LANES; lane++) most[lane] = from[i + lane] > most[lane] ? from[i + lane] : most[lane];
    for (; i < count; i++) most[0] = std::max(most[0], from[i]);
    return *std::max_element(most, most + LANES);
}

int32_t first_of(const float *from, int64_t count, float value) {
    int64_t start = 0;
    for (; start + BLOCK <= count; start += BLOCK) {
        int32_t found = 0;
        for (int64_t i = 0; i < BLOCK; i++) found |= from[start + i] == value;
        if (found) break;
    }
    return int32_t(std::find(from + start, from + count, value) - from);
}

bool is_finite(const float *from, int64_t count) {
    constexpr uint32_t EXPONENT = 0x7f800000;
    uint32_t found[LANES] = {};
    int64_t i = 0;
    uint32_t bits[LANES];
    for (; i + LANES <= count; i += LANES) {
        memcpy(bits, from + i, sizeof bits);
        for (int lane = 0; lane < LANES; lane++) found[lane] |= (bits[lane] & EXPONENT) == EXPONENT;
    }
    uint32_t any = 0;
    for (uint32_t each : found) any |= each;
    for (; i < count; i++) any |= !std::isfinite(from[i]);
    return !any;
}

void penalize(float *scores, const Settings &row) {
    for (int64_t i = 0; i < row.num_seen; i++) {
        float &score = scores[row.seen[i]];
        score = score < 0.0f ? score * row.factor : score / row.divisor;
    }
    for (int64_t i = 0; i < row.num_counted; i++) {
        float &score = scores[row.counted[i]];
        score = (score - row.frequency * row.counts[i]) - row.presence * float(row.counts[i] > 0.0f);
    }
    for (int64_t i = 0; i < row.num_bias; i++) scores[row.bias_ids[i]] += row.bias[i];
}

void forbid(float *scores, const int32_t *mask, int64_t count) {
    for (int64_t word = 0; word * 32 < count; word++) {
        const uint32_t bits = uint32_t(mask[word]);
        if (bits == 0xffffffff) continue;
        float *at = scores + word * 32;
        const int64_t last = std::min<int64_t>(32, count - word * 32);
        if (bits == 0) {
            std::fill(at, at + last, -INF);
        } else {
            for (int64_t i = 0; i < last; i++) at[i] = bits >> i & 1 ? at[i] : -INF;
        }
    }
}

double sum_of_weights(const float *values, int64_t count) {
    Doubles sums[2] = {};
    double total = 0.0;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        if (greatest(values + i, LANES) < NO_WEIGHT) continue;
        for (int lane = 0; lane < LANES; lane += 4) {
            Fours four;
            memcpy(&four, values + i + lane, sizeof four);
            four = four < NO_WEIGHT ? Fours{} + NO_WEIGHT : four;
            sums[lane / 4 % 2] += exponential(__builtin_convertvector(four, Doubles));
        }
    }
    for (; i < count; i++)
        if (values[i] >= NO_WEIGHT) total += exponential(values[i]);
    for (int lane = 0; lane < 4; lane++) total += sums[0][lane] + sums[1][lane];
    return total;
}

// Gather the tokens whose value is at least `least`, in the order of their ids.
void gather(const float *values, int64_t count, float least, std::vector<Token> &tokens) {
    tokens.clear();
    for (int64_t start = 0; start < count; start += LANES) {
        const int64_t last = std::min(start + LANES, count);
        if (last - start == LANES) {
            int32_t found = 0;
            for (int lane = 0; lane < LANES; lane++) found |= values[start + lane] >= least;
            if (!found) continue;
        }
        for (int64_t i = start; i < last; i++)
            if (values[i] >= least && values[i] > -INF) tokens.push_back({values[i], int32_t(i), 0.0});
    }
}

void weigh(std::vector<Token> &tokens) {
    for (Token &token : tokens) token.weight = token.value < -700.0f ? 0.0 : exponential(token.value);
}

bool is_before(const Token &one, const Token &other) {
    return one.value > other.value || (one.value == other.value && one.id < other.id);
}

// Keep the likeliest tokens, as few as weigh `limit` together: those with less than it in front of them.
void keep_head(std::vector<Token> &tokens, double limit) {
    auto first = tokens.begin(), last = tokens.end();  // what is in front is kept, what is behind is not
    double before = 0.0;
    while (last - first > 32) {
        auto middle = first + (last - first) / 2;
        std::nth_element(first, middle, last, is_before);
        double sum = 0.0;
        for (auto at = first; at != middle; ++at) sum += at->weight;
        if (before + sum >= limit) {
            last = middle;
        } else {
            before += sum;
            first = middle;
        }
    }
    std::sort(first, last, is_before);
    for (; first != last && before < limit; ++first) before += first->weight;
    tokens.erase(first, tokens.end());
}

// Leave in `tokens` what top_k, top_p and min_p keep.
void filter(const float *values, int64_t count, const Settings &row, std::vector<Token> &tokens) {
    const bool has_top_k = row.top_k > 0 && row.top_k < count, has_top_p = row.top_p < 1.0;
    if (!has_top_k && !has_top_p) {
        gather(values, count, row.min_log, tokens);
        return weigh(tokens);
    }
    double limit = has_top_k ? 0.0 : row.top_p * sum_of_weights(values, count);
    for (float least = -4.0f;; least *= 2.0f) {
        const bool is_all = least < -1e4f;
        gather(values, count, is_all ? -FLT_MAX : least, tokens);
        weigh(tokens);
        double sum = 0.0;
        for (const Token &token : tokens) sum += token.weight;
        if (is_all || (has_top_k ? int64_t(tokens.size()) >= row.top_k : sum >= limit)) break;
    }
    if (has_top_k && int64_t(tokens.size()) > row.top_k) {
        std::nth_element(tokens.begin(), tokens.begin() + row.top_k, tokens.end(), is_before);
        tokens.resize(row.top_k);
    }
    if (has_top_p) {
        if (has_top_k) {
            std::sort(tokens.begin(), tokens.end(), is_before);
            for (const Token &token : tokens) limit += token.weight;
            limit *= row.top_p;
        }
        keep_head(tokens, limit);
    }
    auto is_small = [&row](const Token &token) { return token.value < row.min_log; };
    tokens.erase(std::remove_if(tokens.begin(), tokens.end(), is_small), tokens.end());
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

int32_t draw_from(const std::vector<Token> &tokens, uint64_t key) {
    Race race(key);
    for (const Token &token : tokens) {
        const uint64_t noise = race.noise(token.id);
        const double least = double(~noise >> 11) * 0x1p-53;  // at most 1 - u
        if (least <= token.weight * race.reach()) race.enter(token.id, token.value, noise);
    }
    return race.winner();
}

// e^x from above, for a bound that needs two digits: the whole power of two goes into the exponent's bits, a short series
// with a margin stands for the rest.
inline float bound_of_weight(float value) {
    const float power = (value < -80.0f ? -80.0f : value) * 1.44269504f;
    const float shifted = power + 12582912.0f;  // rounds to a whole number
    const float rest = power - (shifted - 12582912.0f);
    const float scale = 1.003f * (1.0f + rest * (0.6931472f + rest * (0.2402265f + rest * 0.0555041f)));
    int32_t whole, bits;
    memcpy(&whole, &shifted, sizeof whole);
    memcpy(&bits, &scale, sizeof bits);
    bits += int32_t(uint32_t(whole) << 23);
    float bound;
    memcpy(&bound, &bits, sizeof bound);
    return bound;
}

// Draw from all tokens. `likeliest` goes first, so that few others come near.
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
