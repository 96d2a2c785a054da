#include "attention_part.h"

#include <type_traits>

#include "gemm.h"

namespace gea {
namespace {

constexpr int MAX_SUMS = 12;     // vectors that fit the registers beside what they are made of
constexpr int MAX_LOW_ROWS = 3;  // so few rows leave room for twice as many columns, and need them to hide latency

// Memory is slower than what is done with it, and blocks are too short for the CPU to foresee the next one.
template <class T>
GEA_INLINE void fetch(const T *from, int64_t count) {
    const char *bytes = reinterpret_cast<const char *>(from);
    for (int64_t i = 0; i < count * int64_t(sizeof(T)); i += LINE) __builtin_prefetch(bytes + i);
}

// Products of rows and columns, summed up in registers: with few rows these stay there, else the columns.
template <int ROWS, int VECTORS>
struct Products {
    Floats sums[ROWS * VECTORS] = {};

    // Adds rows[r][i] * columns[v][i][0…7] for all i; `step` numbers from i to i of the columns.
    template <class T>
    GEA_INLINE void add(const float *rows, int64_t stride, const T *const (&columns)[VECTORS], int64_t step,
                        int64_t first, int64_t last) {
        for (int64_t i = first; i < last; i++) {
            if constexpr (ROWS < VECTORS) {
                Floats numbers[ROWS];
#pragma GCC unroll 3
                for (int r = 0; r < ROWS; r++) numbers[r] = splat(rows[r * stride + i]);
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) add_column(numbers, v, load(columns[v] + i * step));
            } else {
                Floats numbers[VECTORS];
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) numbers[v] = load(columns[v] + i * step);
#pragma GCC unroll 6
                for (int r = 0; r < ROWS; r++) add_row(numbers, r, splat(rows[r * stride + i]));
            }
        }
    }

    GEA_INLINE void add_column(const Floats (&numbers)[ROWS], int v, Floats column) {
#pragma GCC unroll 3
        for (int r = 0; r < ROWS; r++) sums[r * VECTORS + v] = fma(numbers[r], column, sums[r * VECTORS + v]);
    }

    GEA_INLINE void add_row(const Floats (&numbers)[VECTORS], int r, Floats row) {
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) sums[r * VECTORS + v] = fma(row, numbers[v], sums[r * VECTORS + v]);
    }

    GEA_INLINE void write(float *to, int64_t stride) const {
#pragma GCC unroll 12
        for (int i = 0; i < ROWS * VECTORS; i++) store(to + i / VECTORS * stride + i % VECTORS * WIDTH, sums[i]);
    }
};

// Scores of `VECTORS` times 8 positions from `i` on; fetches the values of these.
template <int VECTORS, class T>
void score_columns(const Part<T> &part, int64_t i, const float *queries, int64_t num_heads, float *scores) {
    const auto &[view, sight] = part;
    const T *columns[VECTORS], *values[VECTORS];
    for (int v = 0; v < VECTORS; v++) {  // what lies behind the last position is not looked at
        const bool is_in = v == 0 || i + v * WIDTH < sight.stop;
        columns[v] = is_in ? view.key(sight.begin + i + v * WIDTH) : columns[v - 1];
        values[v] = is_in ? view.value(sight.begin + i + v * WIDTH) : values[v - 1];
    }
    const int64_t dim = view.head_dim;
    for_tiles(0, num_heads, [&](int64_t top, auto num_rows) {
        constexpr int ROWS = decltype(num_rows)::value;
        if constexpr (ROWS * VECTORS <= MAX_SUMS) {
            Products<ROWS, VECTORS> products;
            for (int v = 0; v < VECTORS; v++) {  // spread over the work, so that both go on at the same time
                if (top == 0) fetch(values[v], WIDTH * dim);
                products.add(queries + top * dim, dim, columns, view.block_size, v * dim / VECTORS,
                             (v + 1) * dim / VECTORS);
            }
            products.write(scores + top * PARTITION + i, PARTITION);
        }
    });
}

template <class T>
void score(const Part<T> &part, const float *queries, int64_t num_heads, float *scores) {
    const bool is_low = num_heads <= MAX_LOW_ROWS;
    const int64_t step = is_low ? 4 * WIDTH : 2 * WIDTH;
    for (int64_t i = part.sight.start / step * step; i < part.sight.stop; i += step) {
        if (is_low) {
            score_columns<4>(part, i, queries, num_heads, scores);
        } else {
            score_columns<2>(part, i, queries, num_heads, scores);
        }
    }
}

// Scales of the positions of a partition, for 8-bit numbers.
void gather_scales(const Part<int8_t> &part, float *key_scales, float *value_scales) {
    const auto &[view, sight] = part;
    for (int64_t i = sight.start / WIDTH * WIDTH; i < sight.stop; i += WIDTH) {
        const int64_t slot = view.slot(sight.begin + i);
        store(key_scales + i, load(view.key_scales + slot));
        store(value_scales + i, load(view.value_scales + slot));
    }
}

// Turns the scores of one row and head into weights, zero where it sees nothing.
void weigh(float *scores, const Sight &sight, int64_t head, const float *key_scales, const float *value_scales,
           float *most, float *total) {
    const int64_t from = sight.start / PANEL * PANEL, to = round_up(sight.stop, PANEL);
    const int64_t first = sight.first(head), last = sight.last(head);
    *most = NOTHING, *total = 0.0f;
    if (first >= last) {
        std::fill(scores + from, scores + to, 0.0f);
        return;
    }
    const int64_t lower = first / WIDTH * WIDTH, upper = round_up(last, WIDTH);
    if (key_scales != nullptr) {
        for (int64_t i = lower; i < upper; i += WIDTH) store(scores + i, load(scores + i) * load(key_scales + i));
    }
    std::fill(scores + lower, scores + first, NOTHING);
    std::fill(scores + last, scores + upper, NOTHING);
    Floats peak = splat(NOTHING), sums = {};
    for (int64_t i = lower; i < upper; i += WIDTH) peak = max(peak, load(scores + i));
    *most = largest(peak);
    for (int64_t i = lower; i < upper; i += WIDTH) store(scores + i, exp(load(scores + i) - splat(*most)));
    std::fill(scores + from, scores + first, 0.0f);
    std::fill(scores + last, scores + to, 0.0f);
    for (int64_t i = lower; i < upper; i += WIDTH) sums += load(scores + i);
    *total = sum(sums);
    if (value_scales != nullptr) {
        for (int64_t i = lower; i < upper; i += WIDTH) store(scores + i, load(scores + i) * load(value_scales + i));
    }
}

// Fetches the share of `VECTORS` columns in the keys of a part at what follows its position `i` in the block.
template <int VECTORS, class T>
GEA_INLINE void fetch_keys(const Part<T> *part, int64_t i, int64_t count, int64_t column) {
    if (part == nullptr || i + count <= part->sight.start || i >= part->sight.stop) return;
    const auto &[view, sight] = *part;
    const int64_t position = sight.begin + i, offset = position % view.block_size;
    // The share of `count` positions, wherever it lies: a block's keys are as many numbers as its values.
    const T *block = view.key(position) - offset;
    fetch(block + offset * view.head_dim + column * count, VECTORS * WIDTH * count);
}

// Weighted sums of `VECTORS` times 8 columns of the values; fetches as much of the next keys.
template <int VECTORS, class T>
void mix_columns(const Part<T> &part, const Part<T> *next, const float *weights, int64_t num_heads, int64_t column,
                 float *out) {
    const auto &[view, sight] = part;
    for_tiles(0, num_heads, [&, &view = view, &sight = sight](int64_t top, auto num_rows) {
        constexpr int ROWS = decltype(num_rows)::value;
        if constexpr (ROWS * VECTORS <= MAX_SUMS) {
            Products<ROWS, VECTORS> products;
            const int64_t last = sight.last(top + ROWS - 1);
            for (int64_t i = sight.first(top), end; i < last; i = end) {
                end = std::min(last, i + view.block_size - (sight.begin + i) % view.block_size);
                if (top == 0) fetch_keys<VECTORS>(next, i, end - i, column);
                const T *value = view.value(sight.begin + i) + column, *columns[VECTORS];
                for (int v = 0; v < VECTORS; v++) columns[v] = value + v * WIDTH;
                products.add(weights + top * PARTITION + i, PARTITION, columns, view.head_dim, 0, end - i);
            }
            products.write(out + top * view.head_dim + column, view.head_dim);
        }
    });
}

template <class T>
void mix(const Part<T> &part, const Part<T> *next, const float *weights, int64_t num_heads, float *sums) {
    const int64_t dim = part.view.head_dim;
    int64_t column = 0;
    for (; num_heads <= MAX_LOW_ROWS && column + 4 * WIDTH <= dim; column += 4 * WIDTH) {
        mix_columns<4>(part, next, weights, num_heads, column, sums);
    }
    for (; column + 2 * WIDTH <= dim; column += 2 * WIDTH) {
        mix_columns<2>(part, next, weights, num_heads, column, sums);
    }
    if (column < dim) mix_columns<1>(part, next, weights, num_heads, column, sums);
}

}  // namespace

template <class T>
void attend_part(const Part<T> &part, const Part<T> *next, const float *queries, int64_t num_heads, float *scores,
                 const Partial &out) {
    alignas(32) float scales[2 * PARTITION];
    float *key_scales = nullptr, *value_scales = nullptr;
    if constexpr (std::is_same_v<T, int8_t>) {
        key_scales = scales, value_scales = scales + PARTITION;
        gather_scales(part, key_scales, value_scales);
    }
    score(part, queries, num_heads, scores);
    for (int64_t head = 0; head < num_heads; head++) {
        float *own = scores + head * PARTITION;
        weigh(own, part.sight, head, key_scales, value_scales, out.most + head, out.total + head);
    }
    mix(part, next, scores, num_heads, out.sums);
}

#define GEA_ATTEND_PART(T) \
    template void attend_part(const Part<T> &, const Part<T> *, const float *, int64_t, float *, const Partial &)
GEA_ATTEND_PART(float);
GEA_ATTEND_PART(Bf16);
GEA_ATTEND_PART(Fp16);
GEA_ATTEND_PART(int8_t);

void merge(const Partial &whole, const Partial &next, int64_t num_heads, int64_t head_dim) {
    for (int64_t head = 0; head < num_heads; head++) {
        if (next.most[head] == NOTHING) continue;
        const bool is_first = whole.most[head] == NOTHING;
        const float most = is_first ? next.most[head] : largest(whole.most[head], next.most[head]);
        const Floats old_share = is_first ? splat(0.0f) : exp(splat(whole.most[head] - most));
        const Floats new_share = exp(splat(next.most[head] - most));
        whole.total[head] = (is_first ? 0.0f : whole.total[head] * old_share[0]) + next.total[head] * new_share[0];
        whole.most[head] = most;
        float *sums = whole.sums + head * head_dim;
        const float *more = next.sums + head * head_dim;
        for (int64_t i = 0; i < head_dim; i += WIDTH) {
            const Floats old_sums = is_first ? splat(0.0f) : load(sums + i) * old_share;
            store(sums + i, fma(load(more + i), new_share, old_sums));
        }
    }
}

}  // namespace gea
