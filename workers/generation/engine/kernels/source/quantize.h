// 8-bit numbers of a product: weights as quantize.py has them, and the rows that are multiplied with them.
//
// Both are rotated group by group before they are rounded, which leaves their products as they are (quantize.py). Rows
// have 7 bits, so that products of two neighbours fit 16 bits: a byte is the number of steps plus ROW_ZERO, in 1 … 127.
#pragma once

#include <cstdint>

namespace gea {

constexpr int WEIGHT_STEPS = 127;
constexpr int ROW_STEPS = 63;
constexpr int ROW_ZERO = 64;

// Multiplies 64 numbers by the Hadamard matrix of that size, divided by 8: by itself it is the identity.
void rotate_group(float *numbers);

// As quantize_int8 in quantize.py, bit for bit, for `count` <= 64 inputs of one output: returns the scale. A scale is a
// number that bf16 can hold.
float quantize_weights(const float *weights, int64_t count, int8_t *to);

// Rounds a row of `count` numbers: bytes to `to` and a scale for each group to `scales`. The last group is filled up.
void quantize_row(const float *from, int64_t count, uint8_t *to, float *scales);

}  // namespace gea
