#include "batch.h"

#include "export.h"
#include "gemm.h"

namespace gea {

int check_places(const Model &model, const Batch &batch) {
    int64_t num_rows = 0;
    for (int64_t s = 0; s < batch.num_segments; s++) {
        if (batch.lengths[s] < 1) return BAD_SHAPE;
        if (batch.starts[s] < 0) return BAD_POSITION;
        num_rows += batch.lengths[s];
        const int64_t used = ceil_div(batch.end(s), model.block_size);
        if (batch.table_starts[s + 1] - batch.table_starts[s] < used) return BAD_BLOCK;
        for (int64_t b = 0; b < used; b++) {
            if (batch.table(s)[b] < 0 || batch.table(s)[b] >= model.num_blocks) return BAD_BLOCK;
        }
    }
    return num_rows == batch.num_rows ? OK : BAD_SHAPE;
}

int check_batch(const Model &model, const Batch &batch) {
    int64_t num_logits = 0;
    for (int64_t s = 0; s < batch.num_segments; s++) {
        if (batch.logits[s] < 0 || batch.logits[s] > batch.lengths[s]) return BAD_SHAPE;
        if (batch.end(s) > model.max_context) return BAD_POSITION;
        num_logits += batch.logits[s];
    }
    if (num_logits != batch.num_logits) return BAD_SHAPE;
    if (int error = check_places(model, batch)) return error;
    for (int64_t r = 0; r < batch.num_rows; r++) {
        if (batch.token_ids[r] < 0 || batch.token_ids[r] >= model.vocab_size) return BAD_TOKEN;
    }
    return OK;
}

void place_rows(const Model &model, const Batch &batch, Place *places) {
    const int32_t size = int32_t(model.block_size);
    for (int64_t s = 0; s < batch.num_segments; s++) {
        for (int32_t position = batch.starts[s]; position < batch.end(s); position++) {
            *places++ = {position, batch.table(s)[position / size], position % size};
        }
    }
}

void list_wanted(const Batch &batch, int32_t *wanted) {
    int32_t end = 0;
    for (int64_t s = 0; s < batch.num_segments; s++) {
        end += batch.lengths[s];
        for (int32_t row = end - batch.logits[s]; row < end; row++) *wanted++ = row;
    }
}

}  // namespace gea
