// Draws by the Gumbel-max trick. Only few tokens can win, so only few need exact noise; ties go to the lowest id.
#pragma once

#include <cstdint>
#include <vector>

#include "sample_filter.h"

namespace gea {

// As in draw.py: a chain of SplitMix64's finalizer over the three numbers.
uint64_t draw_key(uint64_t seed, uint64_t index, uint64_t position);

int32_t draw_from(const std::vector<Token> &tokens, uint64_t key);

// Draw from all tokens. `likeliest` goes first, so that few others come near.
int32_t draw_from_all(const float *values, int64_t count, int32_t likeliest, uint64_t key);

}  // namespace gea
