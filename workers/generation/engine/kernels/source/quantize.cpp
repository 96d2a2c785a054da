#include "quantize.h"

#include <algorithm>
#include <cmath>

#include "gemm.h"
#include "vector.h"

namespace gea {
namespace {

constexpr int VECTORS = GROUP / WIDTH;

struct Group {
    Floats vectors[VECTORS];
};

// Sums and differences of neighbours that are 1, 2 or 4 apart: `signs` is -1 where a number is the second of a pair.
GEA_INLINE Floats mix(Floats numbers, Floats partners, Floats signs) { return fma(numbers, signs, partners); }

GEA_INLINE Floats mix_within(Floats v) {
    v = mix(v, Floats{v[1], v[0], v[3], v[2], v[5], v[4], v[7], v[6]}, Floats{1, -1, 1, -1, 1, -1, 1, -1});
    v = mix(v, Floats{v[2], v[3], v[0], v[1], v[6], v[7], v[4], v[5]}, Floats{1, 1, -1, -1, 1, 1, -1, -1});
    return mix(v, Floats{v[4], v[5], v[6], v[7], v[0], v[1], v[2], v[3]}, Floats{1, 1, 1, 1, -1, -1, -1, -1});
}

// The fast Walsh-Hadamard transform, its stages in the order of quantize.py.
GEA_INLINE void rotate(Group &group) {
    for (Floats &vector : group.vectors) vector = mix_within(vector);
#pragma GCC unroll 3
    for (int distance = 1; distance < VECTORS; distance *= 2) {
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) {
            if (v & distance) continue;
            const Floats first = group.vectors[v], second = group.vectors[v + distance];
            group.vectors[v] = first + second;
            group.vectors[v + distance] = first - second;
        }
    }
    for (Floats &vector : group.vectors) vector *= splat(0.125f);
}

GEA_INLINE Group read(const float *from, int64_t count) {
    Group group;
    float padded[GROUP] = {};
    if (count < GROUP) std::copy(from, from + count, padded);
    for (int v = 0; v < VECTORS; v++) group.vectors[v] = load((count < GROUP ? padded : from) + v * WIDTH);
    return group;
}

GEA_INLINE float largest_of(const Group &group) {
    Floats most = {};
    for (const Floats &vector : group.vectors) most = max(most, magnitude(vector));
    return largest(most);
}

float round_up_to_bf16(float number) { return bit_cast<float>((bit_cast<uint32_t>(number) + 0xffff) & 0xffff0000u); }

}  // namespace

void rotate_group(float *numbers) {
    Group group = read(numbers, GROUP);
    rotate(group);
    for (int v = 0; v < VECTORS; v++) store(numbers + v * WIDTH, group.vectors[v]);
}

float quantize_weights(const float *weights, int64_t count, int8_t *to) {
    Group group = read(weights, count);
    rotate(group);
    const float scale = round_up_to_bf16(largest_of(group) / float(WEIGHT_STEPS));
    const Floats safe = splat(scale > 0.0f ? scale : 1.0f);
    for (int v = 0; v < VECTORS; v++) {
        const Ints numbers = round_to_ints(group.vectors[v] / safe);
        for (int lane = 0; lane < WIDTH; lane++) to[v * WIDTH + lane] = int8_t(numbers[lane]);
    }
    return scale;
}

void quantize_row(const float *from, int64_t count, uint8_t *to, float *scales) {
    for (int64_t start = 0; start < count; start += GROUP, to += GROUP) {
        Group group = read(from + start, std::min(GROUP, count - start));
        rotate(group);
        const float most = largest_of(group);
        const Floats steps = splat(most > 0.0f ? float(ROW_STEPS) / most : 0.0f);
        for (int v = 0; v < VECTORS; v++) {
            const Ints numbers = round_to_ints(group.vectors[v] * steps) + ROW_ZERO;
            store_bytes(to + v * WIDTH, numbers);
        }
        *scales++ = most / float(ROW_STEPS);
    }
}

}  // namespace gea
