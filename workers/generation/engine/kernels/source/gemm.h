// Products of rows with packed weight matrices.
//
// A matrix (outputs, inputs) lies in panels of 16 outputs, one after the other, so that a product reads it once from
// front to back. A panel of floats is [input][16]. A panel of 8-bit weights is made of groups of 64 inputs, rotated as
// quantize.py says: 16 scales in bf16, 16 sums of the group's weights in int16, then [four inputs][16][4], as a dot
// product of bytes wants them.
//
// Each number of a result is one chain of sums over the inputs in their order, whatever rows stand beside it.
#pragma once

#include "threads.h"
#include "vector.h"

namespace gea {

constexpr int64_t PANEL = 16;
constexpr int64_t LINE = 64;  // bytes that memory hands out at once
constexpr int64_t GROUP = 64;                                  // inputs that share a scale (quantize.py)
constexpr int64_t GROUP_BYTES = PANEL * 4 + PANEL * GROUP;     // scales and sums, then weights
constexpr int64_t QUAD = 4;                                    // inputs of one dot product of bytes
constexpr int64_t ROW_ALIGN = GROUP;                           // rows of activations are padded to this many numbers

enum class Format : int64_t { FP32 = 0, BF16 = 1, FP16 = 2, INT8 = 3 };

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

inline int64_t panel_bytes(Format format, int64_t inputs) {
    switch (format) {
        case Format::FP32: return inputs * PANEL * 4;
        case Format::INT8: return ceil_div(inputs, GROUP) * GROUP_BYTES;
        default: return inputs * PANEL * 2;
    }
}

struct Matrix {
    const uint8_t *panels;
    Format format;
    int64_t outputs;
    int64_t inputs;
};

// Inputs of a product: floats, or bytes with a scale for each group where the weights have 8 bits (quantize.h).
struct Rows {
    int64_t count;
    int64_t stride;  // numbers from row to row; for bytes a multiple of GROUP
    const float *floats;
    const uint8_t *bytes;
    const float *scales;  // (count, stride / GROUP)
};

enum class Finish {
    STORE,  // out = product
    ADD,    // out += product
    GATE,   // out = silu(product of an even panel) * product of the odd panel behind it
};

struct Output {
    float *floats;
    int64_t stride;
    const float *bias;  // (outputs,), for GATE all of the gate before all of the rest; or null
    Finish finish;
};

// To be called by all threads of a team. For GATE, `outputs` of the matrix counts the numbers of a row of the result.
void multiply(Team &team, const Matrix &matrix, const Rows &rows, const Output &output);

// out[i] = number of input i of output `output`.
void read_row(const Matrix &matrix, int64_t output, float *out);

// The sums of a tile: rows times vectors of 8 columns, in registers.
template <int ROWS, int VECTORS>
struct Sums {
    Floats sums[ROWS * VECTORS] = {};

    // Adds rows[r][i] * columns[v][i][0…7] for all i; `step` numbers from input to input of the columns.
    template <class T>
    GEA_INLINE void add(const float *rows, int64_t stride, const T *const (&columns)[VECTORS], int64_t step,
                        int64_t count) {
        for (int64_t i = 0; i < count; i++) {
            Floats numbers[VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) numbers[v] = load(columns[v] + i * step);
#pragma GCC unroll 6
            for (int r = 0; r < ROWS; r++) {
                const Floats row = splat(rows[r * stride + i]);
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) {
                    sums[r * VECTORS + v] = fma(row, numbers[v], sums[r * VECTORS + v]);
                }
            }
        }
    }

    GEA_INLINE void read(const float *from, int64_t stride) {
#pragma GCC unroll 12
        for (int i = 0; i < ROWS * VECTORS; i++) sums[i] = load(from + i / VECTORS * stride + i % VECTORS * WIDTH);
    }

    GEA_INLINE void write(float *to, int64_t stride) const {
#pragma GCC unroll 12
        for (int i = 0; i < ROWS * VECTORS; i++) store(to + i / VECTORS * stride + i % VECTORS * WIDTH, sums[i]);
    }
};

constexpr int MAX_TILE_ROWS = 6;  // 12 sums, 2 vectors of weights and a broadcast number fit 16 registers

// Calls body(first row, std::integral_constant of the number of rows) for tiles of nearly equal height.
template <class Body>
GEA_INLINE void for_tiles(int64_t begin, int64_t end, Body &&body) {
    const int64_t count = end - begin, num_tiles = ceil_div(count, MAX_TILE_ROWS);
    for (int64_t tile = 0; tile < num_tiles; tile++) {
        const int64_t first = begin + tile * count / num_tiles, last = begin + (tile + 1) * count / num_tiles;
        switch (last - first) {
            case 1: body(first, std::integral_constant<int, 1>()); break;
            case 2: body(first, std::integral_constant<int, 2>()); break;
            case 3: body(first, std::integral_constant<int, 3>()); break;
            case 4: body(first, std::integral_constant<int, 4>()); break;
            case 5: body(first, std::integral_constant<int, 5>()); break;
            default: body(first, std::integral_constant<int, 6>()); break;
        }
    }
}

}  // namespace gea
