#include "gemm.h"

namespace gea {
namespace {

constexpr int64_t MOST_PANELS = 16;  // claimed at once

template <int ROWS, class T>
void multiply_panel(const Rows &rows, int64_t first, const uint8_t *panel, int64_t inputs, float *out) {
    const T *weights = reinterpret_cast<const T *>(panel);
    multiply_tile<ROWS>(rows.floats + first * rows.stride, rows.stride, weights, weights + WIDTH, PANEL, inputs, out,
                        PANEL);
}

// Integers within a group, floats across groups; the row's own scale comes last.
template <int ROWS>
void multiply_panel_int8(const Rows &rows, int64_t first, const uint8_t *panel, int64_t inputs, float *out) {
    const int16_t *ints = rows.ints + first * rows.stride;
    Floats zero = {};
    for (int r = 0; r < 2 * ROWS; r++) store(out + r * WIDTH, zero);
    for (int64_t start = 0; start < inputs; start += GROUP, panel += GROUP_BYTES) {
        const int8_t *pairs = reinterpret_cast<const int8_t *>(panel + PANEL * 4);
        Ints low[ROWS] = {}, high[ROWS] = {};
#ifdef __AVX2__
        for (int64_t pair = 0; pair < GROUP / 2; pair++, pairs += 2 * PANEL) {
            const __m128i *bytes = reinterpret_cast<const __m128i *>(pairs);
            __m256i a = _mm256_cvtepi8_epi16(_mm_loadu_si128(bytes));
            __m256i b = _mm256_cvtepi8_epi16(_mm_loadu_si128(bytes + 1));
#pragma GCC unroll 6
            for (int r = 0; r < ROWS; r++) {
                int32_t both;
                memcpy(&both, ints + r * rows.stride + start + 2 * pair, 4);
                __m256i number = _mm256_set1_epi32(both);
                low[r] += (Ints)_mm256_madd_epi16(a, number);
                high[r] += (Ints)_mm256_madd_epi16(b, number);
            }
        }
#else
        for (int64_t i = 0; i < GROUP; i++) {
            for (int r = 0; r < ROWS; r++) {
                int32_t number = ints[r * rows.stride + start + i];
                for (int c = 0; c < WIDTH; c++) {
                    low[r][c] += number * pairs[(i / 2 * PANEL + c) * 2 + i % 2];
                    high[r][c] += number * pairs[(i / 2 * PANEL + WIDTH + c) * 2 + i % 2];
                }
            }
        }
#endif
        const float *scales = reinterpret_cast<const float *>(panel);
        Floats a = load(scales), b = load(scales + WIDTH);
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++) {
            float *sums = out + r * PANEL;
            store(sums, fma(to_floats(low[r]), a, load(sums)));
            store(sums + WIDTH, fma(to_floats(high[r]), b, load(sums + WIDTH)));
        }
    }
    for (int r = 0; r < ROWS; r++) {
        Floats scale = splat(rows.scales[first + r]);
        store(out + r * PANEL, load(out + r * PANEL) * scale);
        store(out + r * PANEL + WIDTH, load(out + r * PANEL + WIDTH) * scale);
    }
}

template <int ROWS>
void multiply_panel(Format format, const Rows &rows, int64_t first, const uint8_t *panel, int64_t inputs, float *out) {
    switch (format) {
        case Format::FP32: return multiply_panel<ROWS, float>(rows, first, panel, inputs, out);
        case Format::BF16: return multiply_panel<ROWS, Bf16>(rows, first, panel, inputs, out);
        case Format::FP16: return multiply_panel<ROWS, Fp16>(rows, first, panel, inputs, out);
        case Format::INT8: return multiply_panel_int8<ROWS>(rows, first, panel, inputs, out);
    }
}

void add_bias(float *tile, int64_t num_rows, const float *bias, int64_t width) {
    for (int64_t r = 0; r < num_rows; r++) {
        for (int64_t c = 0; c < width; c++) tile[r * PANEL + c] += bias[c];
    }
}

// Writes `width` columns of a finished tile; 16 of them but for the last panel.
void finish_tile(const Output &output, int64_t first, int64_t num_rows, int64_t column, int64_t width, float *tile) {
    for (int64_t r = 0; r < num_rows; r++) {
        float *sums = tile + r * PANEL, *to = output.floats + (first + r) * output.stride + column;
        if (output.finish == Finish::ADD) {
            for (int64_t c = 0; c < width; c++) to[c] += sums[c];
        } else if (width == PANEL) {
            store(to, load(sums));
            store(to + WIDTH, load(sums + WIDTH));
        } else {
            for (int64_t c = 0; c < width; c++) to[c] = sums[c];
        }
    }
}

// silu(x) = x / (1 + e^-x)
void gate_tile(int64_t num_rows, float *gate, const float *other) {
    for (int64_t i = 0; i < num_rows * PANEL; i += WIDTH) {
        const Floats x = load(gate + i);
        store(gate + i, x / (splat(1.0f) + exp(-x)) * load(other + i));
    }
}

void multiply_unit(const Matrix &matrix, const Rows &rows, const Output &output, int64_t unit, int64_t bytes) {
    const int64_t column = unit * PANEL, width = std::min(PANEL, matrix.outputs - column);
    const bool is_gated = output.finish == Finish::GATE;
    const uint8_t *panel = matrix.panels + unit * bytes * (is_gated ? 2 : 1);
    for_tiles(rows.count, [&](int64_t first, auto num_rows) {
        constexpr int ROWS = decltype(num_rows)::value;
        alignas(32) float tile[ROWS * PANEL], other[ROWS * PANEL];
        multiply_panel<ROWS>(matrix.format, rows, first, panel, matrix.inputs, tile);
        if (output.bias != nullptr) add_bias(tile, ROWS, output.bias + column, width);
        if (is_gated) {
            multiply_panel<ROWS>(matrix.format, rows, first, panel + bytes, matrix.inputs, other);
            if (output.bias != nullptr) add_bias(other, ROWS, output.bias + matrix.outputs + column, width);
            gate_tile(ROWS, tile, other);
        }
        finish_tile(output, first, ROWS, column, width, tile);
    });
}

}  // namespace

void multiply(Team &team, const Matrix &matrix, const Rows &rows, const Output &output) {
    const int64_t bytes = panel_bytes(matrix.format, matrix.inputs);
    team.share(ceil_div(matrix.outputs, PANEL), MOST_PANELS, [&](int64_t first, int64_t last) {
        for (int64_t unit = first; unit < last; unit++) multiply_unit(matrix, rows, output, unit, bytes);
    });
}

void read_row(const Matrix &matrix, int64_t output, float *out) {
    const int64_t bytes = panel_bytes(matrix.format, matrix.inputs), column = output % PANEL;
    const uint8_t *panel = matrix.panels + output / PANEL * bytes;
    for (int64_t i = 0; i < matrix.inputs; i++) {
        switch (matrix.format) {
            case Format::FP32: out[i] = reinterpret_cast<const float *>(panel)[i * PANEL + column]; break;
            case Format::BF16: out[i] = widen(reinterpret_cast<const Bf16 *>(panel)[i * PANEL + column]); break;
            case Format::FP16: out[i] = widen(reinterpret_cast<const Fp16 *>(panel)[i * PANEL + column]); break;
            case Format::INT8: {
                const uint8_t *group = panel + i / GROUP * GROUP_BYTES;
                const int8_t *pairs = reinterpret_cast<const int8_t *>(group + PANEL * 4);
                int8_t weight = pairs[(i % GROUP / 2 * PANEL + column) * 2 + i % 2];
                out[i] = float(weight) * reinterpret_cast<const float *>(group)[column];
            }
        }
    }
}

}  // namespace gea
