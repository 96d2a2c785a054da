// What the sampler is told of one row: `Settings` of kernels/sampling.py.
#pragma once

#include <cstdint>

namespace gea {

struct Settings {
    double top_p;               // 1 and above: off
    float temperature;          // not used by greedy rows
    float min_log;              // the logarithm of min_p, -inf: off
    float factor, divisor;      // of logits below 0, and of the others, for ids that have been seen
    float frequency, presence;  // of ids that have been counted
    int64_t top_k;              // 0: off
    int64_t is_greedy;
    uint64_t seed, index;
    const int32_t *seen;
    int64_t num_seen;
    const int32_t *counted;
    const float *counts;
    int64_t num_counted;
    const int32_t *bias_ids;
    const float *bias;
    int64_t num_bias;
};

}  // namespace gea
