// A model as Python describes it, and one step's batch. native_model.py and native_runner.py mirror these structures.
//
// The memory of all pointers is Python's and outlives the model; the tables of a batch outlive the call.
#pragma once

#include <cstdint>

namespace gea {

enum class KVFormat : int64_t { FP32 = 0, BF16 = 1, FP16 = 2, INT8 = 3 };

struct Layer {
    const uint8_t *qkv, *out, *gate_up, *down;    // packed; the panels of gate and up alternate
    const float *attention_norm, *mlp_norm;       // (hidden_size,)
    const float *qkv_bias, *out_bias;             // null where the model has none, and so on
    const float *gate_up_bias, *down_bias;
    const float *query_norm, *key_norm;           // (head_dim,)
    int64_t window;                               // positions that a token sees, itself included; 0: all before it
};

struct Model {
    int64_t vocab_size, hidden_size, intermediate_size, num_layers;
    int64_t num_heads, num_kv_heads, head_dim;    // head_dim: a multiple of 8
    int64_t max_context;
    int64_t weight_format, kv_format;
    int64_t num_blocks, block_size;               // block_size: a multiple of 8
    double norm_eps;
    const uint8_t *embedding, *head;              // packed; the same where they are tied
    const float *final_norm;                      // (hidden_size,)
    const float *cos, *sin;                       // (max_context, head_dim / 2)
    const Layer *layers;
    uint8_t *keys, *values;                       // as paged_cache.py has them
    float *key_scales, *value_scales;             // for KVFormat::INT8
};

// Segments one after the other: `lengths` rows of each, the first at position `starts`; `logits` of the last rows want
// their logits. The block table of segment s is tables[table_starts[s] … table_starts[s + 1] - 1].
struct Batch {
    int64_t num_segments, num_rows, num_logits;
    const int32_t *token_ids;                     // (num_rows,)
    const int32_t *starts, *lengths, *logits;     // (num_segments,)
    const int32_t *table_starts;                  // (num_segments + 1,)
    const int32_t *tables;
    float *out;                                   // (num_logits, vocab_size)

    int64_t end(int64_t segment) const { return int64_t(starts[segment]) + lengths[segment]; }
    const int32_t *table(int64_t segment) const { return tables + table_starts[segment]; }
};

// Where one row of a batch stands.
struct Place {
    int32_t position;
    int32_t block;   // the block of that position
    int32_t offset;  // within the block
};

}  // namespace gea
