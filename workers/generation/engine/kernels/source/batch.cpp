#include "batch.h"

#include "export.h"
#include "gemm.h"

namespace gea {

int check_batch(const Model &model, const Batch &batch) {
    int64_t num_rows = 0, num_logits = 0;
    for (int64_t s = 0; s < batch.num_segments; s++) {
        if (batch.lengths[s] < 1 || batch.logits[s] < 0 || batch.logits[s] > batch.lengths[s]) return BAD_SHAPE;
        num_rows += batch.lengths[s];
        num_logits += batch.logits[s];
        if (batch.starts[s] < 0 || batch.end(s) > model.max_context) return BAD_POSITION;
        const int64_t num_blocks = batch.table_starts[s + 1] - batch.table_starts[s];
        const int64_t used = ceil_div(batch.end(s), model.block_size);
        if (num_blocks < used) return BAD_BLOCK;
        for (int64_t b = 0; b < used; b++) {
            if (batch.table(s)[b] < 0 || batch.table(s)[b] >= model.num_blocks) return BAD_BLOCK;
        }
    }
    if (num_rows != batch.num_rows || num_logits != batch.num_logits) return BAD_SHAPE;
    for (int64_t r = 0; r < num_rows; r++) {
        if (batch.token_ids[r] < 0 || batch.token_ids[r] >= model.vocab_size) return BAD_TOKEN;
    }
    return OK;
}

void place_rows(const Model &model, const Batch &batch, Place *places, int32_t *wanted) {
    int64_t row = 0, num_wanted = 0;
    for (int64_t s = 0; s < batch.num_segments; s++) {
        for (int64_t i = 0; i < batch.lengths[s]; i++, row++) {
            const int32_t position = batch.starts[s] + int32_t(i), size = int32_t(model.block_size);
            places[row] = {position, batch.table(s)[position / size], position % size};
            if (i >= batch.lengths[s] - batch.logits[s]) wanted[num_wanted++] = int32_t(row);
        }
    }
}

}  // namespace gea
