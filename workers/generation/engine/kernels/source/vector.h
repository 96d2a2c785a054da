// Eight floats at a time, with AVX2 where there is AVX2 and by the compiler's own means elsewhere.
//
// Every operation gives the same bits for the same bits, wherever in a loop it stands: nothing here may be contracted
// or reordered (see FLAGS in build.py).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#define GEA_INLINE inline __attribute__((always_inline))

namespace gea {

typedef float Floats __attribute__((vector_size(32)));
typedef int32_t Ints __attribute__((vector_size(32)));
constexpr int WIDTH = 8;

struct Bf16 {
    uint16_t bits;
};
struct Fp16 {
    uint16_t bits;
};

template <class To, class From>
GEA_INLINE To bit_cast(const From &from) {
    static_assert(sizeof(To) == sizeof(From), "as many bits");
    To to;
    memcpy(&to, &from, sizeof(To));
    return to;
}

GEA_INLINE float widen(float number) { return number; }
GEA_INLINE float widen(Bf16 number) { return bit_cast<float>(uint32_t(number.bits) << 16); }
GEA_INLINE float widen(int8_t number) { return number; }

// IEEE half to single: shift the fields, let a multiplication renormalize, then put back infinities and NaN.
GEA_INLINE float widen(Fp16 number) {
    uint32_t magnitude = uint32_t(number.bits & 0x7fff) << 13;
    float scaled = bit_cast<float>(magnitude) * 0x1p112f;
    uint32_t bits = bit_cast<uint32_t>(scaled);
    if (magnitude >= 0x7c00u << 13) bits = magnitude | 0x7f800000u;
    return bit_cast<float>(bits | uint32_t(number.bits & 0x8000) << 16);
}

GEA_INLINE void narrow(float number, float *to) { *to = number; }

// Round to nearest, ties to even, as torch does.
GEA_INLINE void narrow(float number, Bf16 *to) {
    uint32_t bits = bit_cast<uint32_t>(number);
    if (number != number) {
        to->bits = 0x7fc0;
    } else {
        to->bits = uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
}

// Round to nearest, ties to even; what is too large becomes the largest number, so that the cache stays finite.
GEA_INLINE void narrow(float number, Fp16 *to) {
    constexpr float LARGEST = 65504.0f;
    if (number > LARGEST) number = LARGEST;
    if (number < -LARGEST) number = -LARGEST;
#ifdef __F16C__
    to->bits = uint16_t(_cvtss_sh(number, _MM_FROUND_TO_NEAREST_INT));
#else
    uint32_t bits = bit_cast<uint32_t>(number), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000u) {  // NaN
        to->bits = uint16_t(sign | 0x7e00);
    } else if (magnitude < 0x38800000u) {  // below the normal range: the addition rounds at the half's last place
        float shifted = bit_cast<float>(magnitude) + 0.5f;
        to->bits = uint16_t(sign | (bit_cast<uint32_t>(shifted) - 0x3f000000u));
    } else {
        to->bits = uint16_t(sign | ((magnitude - 0x38000000u + 0xfff + (magnitude >> 13 & 1)) >> 13));
    }
#endif
}

GEA_INLINE Floats splat(float n) { return Floats{n, n, n, n, n, n, n, n}; }

GEA_INLINE Floats load(const float *from) {
    Floats vector;
    memcpy(&vector, from, sizeof vector);
    return vector;
}

GEA_INLINE Ints load_ints(const void *from) {
    Ints vector;
    memcpy(&vector, from, sizeof vector);
    return vector;
}

// Four bytes, eight times.
GEA_INLINE Ints splat_bytes(const uint8_t *from) {
    int32_t n;
    memcpy(&n, from, sizeof n);
    return Ints{n, n, n, n, n, n, n, n};
}

GEA_INLINE void store(float *to, Floats vector) { memcpy(to, &vector, sizeof vector); }

#ifdef __AVX2__

GEA_INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
GEA_INLINE Floats max(Floats a, Floats b) { return _mm256_max_ps(a, b); }
GEA_INLINE Floats min(Floats a, Floats b) { return _mm256_min_ps(a, b); }
GEA_INLINE Floats to_floats(Ints vector) { return _mm256_cvtepi32_ps((__m256i)vector); }
GEA_INLINE Ints round_to_ints(Floats vector) { return (Ints)_mm256_cvtps_epi32(vector); }

// 32 products of unsigned by signed bytes, four neighbours to a sum. Exact while the unsigned ones are below 128 and the
// signed ones above -128: else the sum of two products would not fit the 16 bits that AVX2 has for it.
GEA_INLINE Ints add_dots(Ints sums, Ints unsigned_bytes, Ints signed_bytes) {
    const __m256i pairs = _mm256_maddubs_epi16((__m256i)unsigned_bytes, (__m256i)signed_bytes);
    return sums + (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}

// Numbers 0 … 255, as bytes.
GEA_INLINE void store_bytes(uint8_t *to, Ints vector) {
    const __m256i all = (__m256i)vector;
    const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i *>(to), _mm_packus_epi16(words, words));
}

GEA_INLINE Ints load_int16(const int16_t *from) {
    return (Ints)_mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
}

GEA_INLINE Floats load(const Bf16 *from) {
    __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i *>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

GEA_INLINE Floats load(const Fp16 *from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
}

GEA_INLINE Floats load(const int8_t *from) {
    __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(from));
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
}

#else

GEA_INLINE Floats fma(Floats a, Floats b, Floats c) { return a * b + c; }
GEA_INLINE Floats max(Floats a, Floats b) { return a > b ? a : b; }
GEA_INLINE Floats min(Floats a, Floats b) { return a < b ? a : b; }

GEA_INLINE Floats to_floats(Ints vector) {
    Floats out;
    for (int i = 0; i < WIDTH; i++) out[i] = float(vector[i]);
    return out;
}

GEA_INLINE Ints round_to_ints(Floats vector) {
    Ints out;
    for (int i = 0; i < WIDTH; i++) out[i] = int32_t(std::nearbyint(vector[i]));
    return out;
}

GEA_INLINE Ints add_dots(Ints sums, Ints unsigned_bytes, Ints signed_bytes) {
    uint8_t left[sizeof(Ints)];
    int8_t right[sizeof(Ints)];
    memcpy(left, &unsigned_bytes, sizeof left);
    memcpy(right, &signed_bytes, sizeof right);
    for (size_t i = 0; i < sizeof left; i++) sums[i / 4] += left[i] * right[i];
    return sums;
}

GEA_INLINE void store_bytes(uint8_t *to, Ints vector) {
    for (int i = 0; i < WIDTH; i++) to[i] = uint8_t(vector[i]);
}

GEA_INLINE Ints load_int16(const int16_t *from) {
    Ints out;
    for (int i = 0; i < WIDTH; i++) out[i] = from[i];
    return out;
}

template <class T>
GEA_INLINE Floats load(const T *from) {
    Floats out;
    for (int i = 0; i < WIDTH; i++) out[i] = widen(from[i]);
    return out;
}

#endif

GEA_INLINE float sum(Floats v) { return ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7])); }

GEA_INLINE float largest(float a, float b) { return a > b ? a : b; }

GEA_INLINE float largest(Floats v) {
    float first = largest(largest(v[0], v[4]), largest(v[1], v[5]));
    return largest(first, largest(largest(v[2], v[6]), largest(v[3], v[7])));
}

GEA_INLINE Floats magnitude(Floats v) { return (Floats)((Ints)v & 0x7fffffff); }

// e^x by Moshier's expf of the Cephes library: x = n ln 2 + r, a polynomial for e^r, 2^n by its exponent. Within 2 ulp
// for |x| <= 87; beyond that the result of the limit, never 0 or infinite.
GEA_INLINE Floats exp(Floats x) {
    x = min(max(x, splat(-87.0f)), splat(87.0f));
    const Floats shift = splat(0x1.8p23f);  // adding it leaves the rounded integer in the lowest bits
    Floats shifted = fma(x, splat(1.44269504088896341f), shift);
    Floats n = shifted - shift;
    Floats r = fma(n, splat(-0.693359375f), x);
    r = fma(n, splat(2.12194440e-4f), r);
    Floats p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, r * r, r) + splat(1.0f);
    Ints exponent = ((Ints)shifted << 23) + 0x3f800000;  // the bits of `shift` fall out at the top
    return p * (Floats)exponent;
}

}  // namespace gea
