// What a batch from Python says of its rows.
#pragma once

#include "model.h"

namespace gea {

// Each returns the Error of a batch that does not fit: to the cache, and to all of a model. Nothing else looks at such a
// batch.
int check_places(const Model &model, const Batch &batch);
int check_batch(const Model &model, const Batch &batch);

// Fills where each row stands: `places` (num_rows,).
void place_rows(const Model &model, const Batch &batch, Place *places);

// Fills which rows want their logits: `wanted` (num_logits,).
void list_wanted(const Batch &batch, int32_t *wanted);

}  // namespace gea
