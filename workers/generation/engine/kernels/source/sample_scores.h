// A row of logits before the draw: whether it is sound, what penalties and a form make of it, and its greatest.
#pragma once

#include <cstdint>

#include "sample.h"

namespace gea {

bool is_finite(const float *from, int64_t count);

// The greatest of `count` numbers, none of which is NaN.
float greatest(const float *from, int64_t count);

// The lowest place of a number that is there.
int32_t first_of(const float *from, int64_t count, float value);

void penalize(float *scores, const Settings &row);

// Bit i of word w of the mask allows token 32 w + i; the others get -INF.
void forbid(float *scores, const int32_t *mask, int64_t count);

}  // namespace gea
