#include "gemm.h"

namespace gea {
namespace {

// Panels and rows that are worked at together stay in the second-level cache.
constexpr int64_t MOST_PANEL_BYTES = 160 * 1024;
constexpr int64_t MOST_ROW_BYTES = 160 * 1024;
constexpr int64_t MOST_PANELS = 16;  // claimed at once
constexpr int64_t LINE = 64;

// Weights that are needed next, fetched bit by bit while others are used: memory and arithmetic then overlap.
struct Ahead {
    const uint8_t *next, *end;
    int64_t step;

    GEA_INLINE void fetch() {
        for (int64_t i = 0; i < step && next < end; i++, next += LINE) __builtin_prefetch(next, 0, 2);
    }
};

template <int ROWS, class T>
void multiply_panel(const Rows &rows, int64_t first, const uint8_t *panel, int64_t inputs, Ahead &ahead, float *out) {
    const T *weights = reinterpret_cast<const T *>(panel);
    const float *numbers = rows.floats + first * rows.stride;
    Sums<ROWS> sums;
    for (int64_t start = 0; start < inputs; start += GROUP) {
        const T *left = weights + start * PANEL;
        ahead.fetch();
        sums.add(numbers + start, rows.stride, left, left + WIDTH, PANEL, std::min(GROUP, inputs - start));
    }
    sums.write(out, PANEL);
}

// Integers within a group, floats across groups; the row's own scale comes last.
template <int ROWS>
void multiply_panel_int8(const Rows &rows, int64_t first, const uint8_t *panel, int64_t inputs, Ahead &ahead,
                         float *out) {
    const int16_t *ints = rows.ints + first * rows.stride;
    Floats zero = {};
    for (int r = 0; r < 2 * ROWS; r++) store(out + r * WIDTH, zero);
    for (int64_t start = 0; start < inputs; start += GROUP, panel += GROUP_BYTES) {
        const int8_t *pairs = reinterpret_cast<const int8_t *>(panel + PANEL * 4);
        Ints low[ROWS] = {}, high[ROWS] = {};
        ahead.fetch();
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
void multiply_panel(Format format, const Rows &rows, int64_t first, const uint8_t *panel, int64_t inputs, Ahead &ahead,
                    float *out) {
    switch (format) {
        case Format::FP32: return multiply_panel<ROWS, float>(rows, first, panel, inputs, ahead, out);
        case Format::BF16: return multiply_panel<ROWS, Bf16>(rows, first, panel, inputs, ahead, out);
        case Format::FP16: return multiply_panel<ROWS, Fp16>(rows, first, panel, inputs, ahead, out);
        case Format::INT8: return multiply_panel_int8<ROWS>(rows, first, panel, inputs, ahead, out);
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

// One product's work on a range of panels.
struct Piece {
    const Matrix &matrix;
    const Rows &rows;
    const Output &output;
    int64_t bytes;  // of a panel
    int64_t last;   // unit: a panel, or a pair of panels for GATE

    bool is_gated() const { return output.finish == Finish::GATE; }
    const uint8_t *panel(int64_t unit) const { return matrix.panels + unit * bytes * (is_gated() ? 2 : 1); }

    void multiply_unit(int64_t unit, int64_t first_row, int64_t last_row) const {
        const int64_t column = unit * PANEL, width = std::min(PANEL, matrix.outputs - column);
        Ahead ahead = ahead_of(unit, last_row - first_row);
        for_tiles(first_row, last_row, [&](int64_t first, auto num_rows) {
            constexpr int ROWS = decltype(num_rows)::value;
            alignas(32) float tile[ROWS * PANEL], other[ROWS * PANEL];
            multiply_panel<ROWS>(matrix.format, rows, first, panel(unit), matrix.inputs, ahead, tile);
            if (output.bias != nullptr) add_bias(tile, ROWS, output.bias + column, width);
            if (is_gated()) {
                multiply_panel<ROWS>(matrix.format, rows, first, panel(unit) + bytes, matrix.inputs, ahead, other);
                if (output.bias != nullptr) add_bias(other, ROWS, output.bias + matrix.outputs + column, width);
                gate_tile(ROWS, tile, other);
            }
            finish_tile(output, first, ROWS, column, width, tile);
        });
    }

    // The unit behind this one, in as many steps as this one takes.
    Ahead ahead_of(int64_t unit, int64_t num_rows) const {
        const int64_t num_steps = ceil_div(num_rows, MAX_TILE_ROWS) * ceil_div(matrix.inputs, GROUP);
        return {panel(unit + 1), panel(std::min(unit + 2, last)), ceil_div(ceil_div(bytes, LINE), num_steps)};
    }
};

}  // namespace

void multiply(Team &team, const Matrix &matrix, const Rows &rows, const Output &output) {
    const int64_t bytes = panel_bytes(matrix.format, matrix.inputs);
    const int64_t row_bytes = matrix.inputs * (matrix.format == Format::INT8 ? 2 : 4);
    const int64_t num_blocks = ceil_div(rows.count * row_bytes, MOST_ROW_BYTES);
    const int64_t most_panels = num_blocks > 1 ? std::max<int64_t>(1, MOST_PANEL_BYTES / bytes) : MOST_PANELS;
    team.share(ceil_div(matrix.outputs, PANEL), most_panels, [&](int64_t first, int64_t last) {
        const Piece piece{matrix, rows, output, bytes, last};
        for (int64_t block = 0; block < num_blocks; block++) {
            const int64_t first_row = block * rows.count / num_blocks, last_row = (block + 1) * rows.count / num_blocks;
            for (int64_t unit = first; unit < last; unit++) piece.multiply_unit(unit, first_row, last_row);
        }
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
