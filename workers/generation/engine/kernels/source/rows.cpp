#include "rows.h"

#include <algorithm>
#include <cmath>

namespace gea {
namespace {

// As quantize_kv in paged_cache.py, bit for bit.
float quantize_head(const float *from, int64_t count, int8_t *to, int64_t step) {
    float most = 0.0f;
    for (int64_t i = 0; i < count; i++) most = largest(most, std::fabs(from[i]));
    const float scale = most / 127.0f, safe = scale > 0.0f ? scale : 1.0f;
    for (int64_t i = 0; i < count; i++) {
        float number = std::nearbyint(from[i] / safe);
        to[i * step] = int8_t(std::clamp(number, -127.0f, 127.0f));
    }
    return scale;
}

// Su et al. 2021, in the half-split order of transformers.
void turn(float *head, const float *cos, const float *sin, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        const float first = head[i], second = head[half + i];
        head[i] = first * cos[i] - second * sin[i];
        head[half + i] = second * cos[i] + first * sin[i];
    }
}

template <class T>
void write_numbers(const Model &model, int64_t entry, int64_t offset, const float *key, const float *value) {
    T *keys = reinterpret_cast<T *>(model.keys) + entry * model.head_dim * model.block_size + offset;
    T *values = reinterpret_cast<T *>(model.values) + (entry * model.block_size + offset) * model.head_dim;
    for (int64_t i = 0; i < model.head_dim; i++) {
        narrow(key[i], keys + i * model.block_size);
        narrow(value[i], values + i);
    }
}

}  // namespace

void write_entry(const Model &model, int64_t entry, int64_t offset, const float *key, const float *value) {
    switch (KVFormat(model.kv_format)) {
        case KVFormat::FP32: return write_numbers<float>(model, entry, offset, key, value);
        case KVFormat::BF16: return write_numbers<Bf16>(model, entry, offset, key, value);
        case KVFormat::FP16: return write_numbers<Fp16>(model, entry, offset, key, value);
        case KVFormat::INT8: {
            const int64_t block = entry * model.block_size;
            int8_t *keys = reinterpret_cast<int8_t *>(model.keys) + block * model.head_dim + offset;
            int8_t *values = reinterpret_cast<int8_t *>(model.values) + (block + offset) * model.head_dim;
            model.key_scales[block + offset] = quantize_head(key, model.head_dim, keys, model.block_size);
            model.value_scales[block + offset] = quantize_head(value, model.head_dim, values, 1);
        }
    }
}

void rms_norm(const float *from, const float *weight, int64_t count, float eps, float *to) {
    Floats squares = {};
    int64_t i = 0;
    for (; i + WIDTH <= count; i += WIDTH) squares = fma(load(from + i), load(from + i), squares);
    float total = sum(squares);
    for (int64_t rest = i; rest < count; rest++) total += from[rest] * from[rest];
    const float scale = 1.0f / std::sqrt(total / float(count) + eps);
    for (i = 0; i + WIDTH <= count; i += WIDTH) store(to + i, load(weight + i) * (load(from + i) * splat(scale)));
    for (; i < count; i++) to[i] = weight[i] * (from[i] * scale);
}

void place_head(const Model &model, int64_t layer, const Place &place, float *qkv, int64_t head) {
    const bool is_key = head >= model.num_heads;
    const Layer &weights = model.layers[layer];
    float *numbers = qkv + head * model.head_dim;
    const float *norm = is_key ? weights.key_norm : weights.query_norm;
    if (norm != nullptr) rms_norm(numbers, norm, model.head_dim, float(model.norm_eps), numbers);
    const int64_t half = model.head_dim / 2;
    turn(numbers, model.cos + place.position * half, model.sin + place.position * half, half);
    if (!is_key) return;
    const int64_t kv_head = head - model.num_heads;
    const int64_t entry = (layer * model.num_blocks + place.block) * model.num_kv_heads + kv_head;
    write_entry(model, entry, place.offset, numbers, numbers + model.num_kv_heads * model.head_dim);
}

}  // namespace gea
