// Few tokens of a vocabulary are ever kept, so the head is found by a bound first: one pass counts, one gathers, and only
// what lies at the bound itself is put in order.
#include "sample_filter.h"

#include <algorithm>
#include <cfloat>
#include <cstring>

#include "sample_weight.h"

namespace gea {
namespace {

typedef int32_t Bins __attribute__((vector_size(16)));

constexpr float NO_WEIGHT = -50.0f;  // e^-50 of a million tokens is nothing in a double beside 1
constexpr int NUM_BINS = 96;
constexpr float FINE = 8.0f, COARSE = 2.0f;  // bins per unit: down to -12, where most heads end, and then to -48
constexpr double ROUNDING = 1e-9;  // far more than the order of a sum can change

// Weights of all tokens together, and of those in each bin: bin i has the values from -i / bins_per_unit downwards.
struct Histogram {
    float bins_per_unit;
    double total = 0.0;
    double bins[NUM_BINS + 1] = {};  // the last one has what lies below
};

// Values above `sure` are all kept, those below `least` are not.
struct Bounds {
    float sure, least;
};

GEA_INLINE float greatest_of_lanes(const float *from) {
    Floats most, next;
    memcpy(&most, from, sizeof most);
    for (int lane = WIDTH; lane < LANES; lane += WIDTH) {
        memcpy(&next, from + lane, sizeof next);
        most = next > most ? next : most;
    }
    float found = most[0];
    for (int lane = 1; lane < WIDTH; lane++) found = std::max(found, most[lane]);
    return found;
}

GEA_INLINE void add_to_bins(Fours values, const Doubles &weights, float bins_per_unit, double *bins) {
    const Bins places = __builtin_convertvector(values * -bins_per_unit, Bins);
    for (int lane = 0; lane < 4; lane++) bins[places[lane] < NUM_BINS ? places[lane] : NUM_BINS] += weights[lane];
}

Histogram weigh_all(const float *values, int64_t count, float bins_per_unit) {
    Histogram found{bins_per_unit};
    const float least_binned = -NUM_BINS / bins_per_unit;
    Doubles sums[2] = {};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const float most = greatest_of_lanes(values + i);
        if (most < NO_WEIGHT) continue;
        for (int lane = 0; lane < LANES; lane += 4) {
            Fours four;
            memcpy(&four, values + i + lane, sizeof four);
            four = four < NO_WEIGHT ? Fours{} + NO_WEIGHT : four;
            const Doubles weights = exponential(__builtin_convertvector(four, Doubles));
            sums[lane / 4 % 2] += weights;
            if (most > least_binned) add_to_bins(four, weights, bins_per_unit, found.bins);
        }
    }
    for (; i < count; i++) {
        if (values[i] < NO_WEIGHT) continue;
        const double weight = exponential(values[i]);
        found.total += weight;
        found.bins[std::min(int(values[i] * -bins_per_unit), NUM_BINS)] += weight;
    }
    for (int lane = 0; lane < 4; lane++) found.total += sums[0][lane] + sums[1][lane];
    return found;
}

// Return between which values the head of weight `limit` ends.
Bounds bounds_of_head(const Histogram &all, double limit) {
    double sum = 0.0;
    int num_sure = 0;  // bins
    for (int bin = 0; bin < NUM_BINS; bin++) {
        sum += all.bins[bin];
        if (sum < limit * (1.0 - ROUNDING)) num_sure = bin + 1;
        if (sum < limit * (1.0 + ROUNDING)) continue;
        return {num_sure ? -num_sure / all.bins_per_unit : INF, -(bin + 1) / all.bins_per_unit};
    }
    return {INF, -FLT_MAX};
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

// Keep the likeliest tokens, as few as weigh `limit` together: those with less than it in front of them. Whatever is above
// `sure` belongs to them.
void keep_head(std::vector<Token> &tokens, double limit, float sure) {
    auto is_sure = [sure](const Token &token) { return token.value > sure; };
    auto first = std::partition(tokens.begin(), tokens.end(), is_sure), last = tokens.end();
    double before = 0.0;
    for (auto at = tokens.begin(); at != first; ++at) before += at->weight;
    while (last - first > 32) {  // what is in front is kept, what is behind is not
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

// Gather the likeliest `row.top_k`, and of these the head.
void keep_likeliest(const float *values, int64_t count, const Settings &row, std::vector<Token> &tokens) {
    for (float least = -4.0f;; least *= 2.0f) {
        const bool is_all = least < -1e4f;
        gather(values, count, is_all ? -FLT_MAX : least, tokens);
        if (is_all || int64_t(tokens.size()) >= row.top_k) break;
    }
    if (int64_t(tokens.size()) > row.top_k) {
        std::nth_element(tokens.begin(), tokens.begin() + row.top_k, tokens.end(), is_before);
        tokens.resize(size_t(row.top_k));
    }
    weigh(tokens);
    if (row.top_p >= 1.0) return;
    std::sort(tokens.begin(), tokens.end(), is_before);
    double total = 0.0;
    for (const Token &token : tokens) total += token.weight;
    keep_head(tokens, row.top_p * total, INF);
}

}  // namespace

void filter(const float *values, int64_t count, const Settings &row, std::vector<Token> &tokens) {
    if (row.top_k > 0 && row.top_k < count) {
        keep_likeliest(values, count, row, tokens);
    } else if (row.top_p < 1.0) {
        Histogram all = weigh_all(values, count, FINE);
        const double limit = row.top_p * all.total;
        Bounds bounds = bounds_of_head(all, limit);
        if (bounds.least == -FLT_MAX) bounds = bounds_of_head(weigh_all(values, count, COARSE), limit);
        gather(values, count, bounds.least, tokens);
        weigh(tokens);
        keep_head(tokens, limit, bounds.sure);
    } else {
        gather(values, count, row.min_log, tokens);
        weigh(tokens);
    }
    auto is_small = [&row](const Token &token) { return token.value < row.min_log; };
    tokens.erase(std::remove_if(tokens.begin(), tokens.end(), is_small), tokens.end());
}

}  // namespace gea
