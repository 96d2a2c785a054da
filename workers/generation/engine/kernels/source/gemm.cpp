#include "gemm.h"

#include "quantize.h"

namespace gea {
namespace {

// What is worked at together: a part of a panel stays in the first-level cache, panels and rows in the second.
constexpr int64_t MOST_DEPTH_BYTES = 26 * 1024;
constexpr int64_t MOST_PANEL_BYTES = 160 * 1024;
constexpr int64_t MOST_ROW_BYTES = 160 * 1024;
constexpr int64_t MOST_ROWS = 96;
constexpr int64_t MOST_PANELS = 16;  // claimed at once

// Weights that are needed next, fetched bit by bit while others are used: memory and arithmetic then overlap.
struct Ahead {
    const uint8_t *next, *end;
    int64_t step;

    GEA_INLINE void fetch() {
        for (int64_t i = 0; i < step && next < end; i++, next += LINE) __builtin_prefetch(next, 0, 2);
    }
};

// sums[r][0…15] += the product of a tile's rows with the inputs `begin` to `end` of a panel.
template <int ROWS, class T>
void add_products(const Rows &rows, int64_t first, const uint8_t *panel, int64_t begin, int64_t end, Ahead &ahead,
                  float *sums) {
    const T *weights = reinterpret_cast<const T *>(panel);
    const float *numbers = rows.floats + first * rows.stride;
    Sums<ROWS, 2> tile;
    tile.read(sums, PANEL);
    for (int64_t start = begin; start < end; start += GROUP) {
        const T *left = weights + start * PANEL;
        ahead.fetch();
        tile.add(numbers + start, rows.stride, {left, left + WIDTH}, PANEL, std::min(GROUP, end - start));
    }
    tile.write(sums, PANEL);
}

// Integers within a group, floats across groups.
template <int ROWS>
void add_products_int8(const Rows &rows, int64_t first, const uint8_t *panel, int64_t begin, int64_t end, Ahead &ahead,
                       float *sums) {
    const uint8_t *bytes = rows.bytes + first * rows.stride;
    const float *row_scales = rows.scales + first * (rows.stride / GROUP);
    panel += begin / GROUP * GROUP_BYTES;
    for (int64_t start = begin; start < end; start += GROUP, panel += GROUP_BYTES) {
        const Bf16 *scales = reinterpret_cast<const Bf16 *>(panel);
        const int16_t *offsets = reinterpret_cast<const int16_t *>(scales + PANEL);
        const uint8_t *quads = panel + PANEL * 4;
        const Ints left_offset = load_int16(offsets) * -ROW_ZERO, right_offset = load_int16(offsets + WIDTH) * -ROW_ZERO;
        Ints left[ROWS], right[ROWS];
        ahead.fetch();
        for (int r = 0; r < ROWS; r++) left[r] = left_offset, right[r] = right_offset;
        for (int64_t i = 0; i < GROUP; i += QUAD, quads += QUAD * PANEL) {
            const Ints a = load_ints(quads), b = load_ints(quads + sizeof(Ints));
#pragma GCC unroll 6
            for (int r = 0; r < ROWS; r++) {
                const Ints number = splat_bytes(bytes + r * rows.stride + start + i);
                left[r] = add_dots(left[r], number, a);
                right[r] = add_dots(right[r], number, b);
            }
        }
        const Floats a = load(scales), b = load(scales + WIDTH);
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++) {
            const Floats scale = splat(row_scales[r * (rows.stride / GROUP) + start / GROUP]);
            float *to = sums + r * PANEL;
            store(to, fma(to_floats(left[r]), a * scale, load(to)));
            store(to + WIDTH, fma(to_floats(right[r]), b * scale, load(to + WIDTH)));
        }
    }
}

template <int ROWS>
void add_products(Format format, const Rows &rows, int64_t first, const uint8_t *panel, int64_t begin, int64_t end,
                  Ahead &ahead, float *sums) {
    switch (format) {
        case Format::FP32: return add_products<ROWS, float>(rows, first, panel, begin, end, ahead, sums);
        case Format::BF16: return add_products<ROWS, Bf16>(rows, first, panel, begin, end, ahead, sums);
        case Format::FP16: return add_products<ROWS, Fp16>(rows, first, panel, begin, end, ahead, sums);
        case Format::INT8: return add_products_int8<ROWS>(rows, first, panel, begin, end, ahead, sums);
    }
}

// One product's work on some of its units: panels, or pairs of panels for GATE.
class Piece {
  public:
    Piece(const Matrix &matrix, const Rows &rows, const Output &output, int64_t bytes, int64_t last)
        : matrix_(matrix), rows_(rows), output_(output), bytes_(bytes), last_(last) {}

    void multiply(int64_t unit, int64_t first, int64_t last) const {
        alignas(32) float sums[MOST_ROWS * PANEL], others[MOST_ROWS * PANEL];
        const int64_t column = unit * PANEL, width = std::min(PANEL, matrix_.outputs - column), count = last - first;
        Ahead ahead = ahead_of(unit, count);
        multiply_panel(panel(unit), first, last, ahead, sums);
        if (output_.bias != nullptr) add_bias(output_.bias + column, count, width, sums);
        if (is_gated()) {
            multiply_panel(panel(unit) + bytes_, first, last, ahead, others);
            if (output_.bias != nullptr) add_bias(output_.bias + matrix_.outputs + column, count, width, others);
            gate(count, sums, others);
        }
        finish(first, count, column, width, sums);
    }

  private:
    bool is_gated() const { return output_.finish == Finish::GATE; }
    const uint8_t *panel(int64_t unit) const { return matrix_.panels + unit * bytes_ * (is_gated() ? 2 : 1); }

    // The unit behind this one, in as many steps as this one takes.
    Ahead ahead_of(int64_t unit, int64_t num_rows) const {
        const int64_t num_steps = ceil_div(num_rows, MAX_TILE_ROWS) * ceil_div(matrix_.inputs, GROUP);
        return {panel(unit + 1), panel(std::min(unit + 2, last_)), ceil_div(ceil_div(bytes_, LINE), num_steps)};
    }

    void multiply_panel(const uint8_t *panel, int64_t first, int64_t last, Ahead &ahead, float *sums) const {
        const int64_t depth = std::max<int64_t>(1, MOST_DEPTH_BYTES * matrix_.inputs / bytes_ / GROUP) * GROUP;
        std::fill(sums, sums + (last - first) * PANEL, 0.0f);
        for (int64_t begin = 0; begin < matrix_.inputs; begin += depth) {
            const int64_t end = std::min(matrix_.inputs, begin + depth);
            for_tiles(first, last, [&](int64_t row, auto num_rows) {
                add_products<decltype(num_rows)::value>(matrix_.format, rows_, row, panel, begin, end, ahead,
                                                        sums + (row - first) * PANEL);
            });
        }
    }

    static void add_bias(const float *bias, int64_t num_rows, int64_t width, float *sums) {
        for (int64_t r = 0; r < num_rows; r++) {
            for (int64_t c = 0; c < width; c++) sums[r * PANEL + c] += bias[c];
        }
    }

    // silu(x) = x / (1 + e^-x)
    static void gate(int64_t num_rows, float *sums, const float *others) {
        for (int64_t i = 0; i < num_rows * PANEL; i += WIDTH) {
            const Floats x = load(sums + i);
            store(sums + i, x / (splat(1.0f) + exp(-x)) * load(others + i));
        }
    }

    // Writes `width` columns of the result; 16 of them but for the last panel.
    void finish(int64_t first, int64_t num_rows, int64_t column, int64_t width, const float *sums) const {
        for (int64_t r = 0; r < num_rows; r++, sums += PANEL) {
            float *to = output_.floats + (first + r) * output_.stride + column;
            if (output_.finish == Finish::ADD) {
                for (int64_t c = 0; c < width; c++) to[c] += sums[c];
            } else if (width == PANEL) {
                store(to, load(sums));
                store(to + WIDTH, load(sums + WIDTH));
            } else {
                for (int64_t c = 0; c < width; c++) to[c] = sums[c];
            }
        }
    }

    const Matrix &matrix_;
    const Rows &rows_;
    const Output &output_;
    const int64_t bytes_;  // of a panel
    const int64_t last_;   // unit behind the piece
};

}  // namespace

void multiply(Team &team, const Matrix &matrix, const Rows &rows, const Output &output) {
    const int64_t bytes = panel_bytes(matrix.format, matrix.inputs);
    const int64_t row_bytes = matrix.inputs * (matrix.format == Format::INT8 ? 1 : 4);
    const int64_t num_blocks = std::max(ceil_div(rows.count * row_bytes, MOST_ROW_BYTES), ceil_div(rows.count, MOST_ROWS));
    const int64_t most_units = num_blocks > 1 ? std::max<int64_t>(1, MOST_PANEL_BYTES / bytes) : MOST_PANELS;
    team.share(ceil_div(matrix.outputs, PANEL), most_units, [&](int64_t first, int64_t last) {
        const Piece piece(matrix, rows, output, bytes, last);
        for (int64_t block = 0; block < num_blocks; block++) {
            const int64_t top = block * rows.count / num_blocks, bottom = (block + 1) * rows.count / num_blocks;
            for (int64_t unit = first; unit < last; unit++) piece.multiply(unit, top, bottom);
        }
    });
}

namespace {

template <class T>
void read_floats(const uint8_t *panel, int64_t column, int64_t inputs, float *out) {
    const T *numbers = reinterpret_cast<const T *>(panel) + column;
    for (int64_t i = 0; i < inputs; i++) out[i] = widen(numbers[i * PANEL]);
}

void read_int8(const uint8_t *panel, int64_t column, int64_t inputs, float *out) {
    for (int64_t start = 0; start < inputs; start += GROUP, panel += GROUP_BYTES) {
        const float scale = widen(reinterpret_cast<const Bf16 *>(panel)[column]);
        const int8_t *quads = reinterpret_cast<const int8_t *>(panel + PANEL * 4);
        float numbers[GROUP];
        for (int64_t i = 0; i < GROUP; i++) {
            numbers[i] = float(quads[(i / QUAD * PANEL + column) * QUAD + i % QUAD]) * scale;
        }
        rotate_group(numbers);
        std::copy(numbers, numbers + std::min(GROUP, inputs - start), out + start);
    }
}

}  // namespace

void read_row(const Matrix &matrix, int64_t output, float *out) {
    const uint8_t *panel = matrix.panels + output / PANEL * panel_bytes(matrix.format, matrix.inputs);
    const int64_t column = output % PANEL;
    switch (matrix.format) {
        case Format::FP32: return read_floats<float>(panel, column, matrix.inputs, out);
        case Format::BF16: return read_floats<Bf16>(panel, column, matrix.inputs, out);
        case Format::FP16: return read_floats<Fp16>(panel, column, matrix.inputs, out);
        case Format::INT8: return read_int8(panel, column, matrix.inputs, out);
    }
}

}  // namespace gea
