// What top_k, top_p and min_p leave of a row. Weights are summed in doubles.
#pragma once

#include <cstdint>
#include <vector>

#include "sample.h"

namespace gea {

struct Token {
    float value;  // (logit - greatest) / temperature: at most 0
    int32_t id;
    double weight;  // e^value
};

// Leave in `tokens` what top_k, top_p and min_p keep.
void filter(const float *values, int64_t count, const Settings &row, std::vector<Token> &tokens);

}  // namespace gea
