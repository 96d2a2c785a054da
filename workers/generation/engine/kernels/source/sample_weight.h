// Numbers that the parts of the sampler share, and the weight of a token: e^x in doubles, four at a time.
#pragma once

#include <cstdint>
#include <limits>

#include "vector.h"

namespace gea {

constexpr int LANES = 32;
constexpr float INF = std::numeric_limits<float>::infinity();

typedef float Fours __attribute__((vector_size(16)));
typedef double Doubles __attribute__((vector_size(32)));
typedef uint64_t Longs __attribute__((vector_size(32)));

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

}  // namespace gea
