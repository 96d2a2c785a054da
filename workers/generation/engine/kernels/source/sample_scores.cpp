#include "sample_scores.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "sample_weight.h"

namespace gea {

constexpr int64_t BLOCK = 256;

float greatest(const float *from, int64_t count) {
    Floats most[4];
    for (Floats &each : most) each = Floats{} - INF;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int part = 0; part < 4; part++) {
            Floats next;
            memcpy(&next, from + i + part * WIDTH, sizeof next);
            most[part] = next > most[part] ? next : most[part];
        }
    float found = -INF;
    for (; i < count; i++) found = std::max(found, from[i]);
    for (const Floats &each : most)
        for (int lane = 0; lane < WIDTH; lane++) found = std::max(found, each[lane]);
    return found;
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
    constexpr int32_t EXPONENT = 0x7f800000;
    Ints found{}, bits;
    int64_t i = 0;
    for (; i + WIDTH <= count; i += WIDTH) {
        memcpy(&bits, from + i, sizeof bits);
        found |= (bits & EXPONENT) == EXPONENT;
    }
    int32_t any = 0;
    for (int lane = 0; lane < WIDTH; lane++) any |= found[lane];
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

}  // namespace gea
