// What a batch from Python says of its rows.
#pragma once

#include "model.h"

namespace gea {

// Returns the Error of a batch that does not fit model or cache; nothing else looks at such a batch.
int check_batch(const Model &model, const Batch &batch);

// Fills where each row stands, and which rows want their logits.
void place_rows(const Model &model, const Batch &batch, Place *places, int32_t *wanted);

}  // namespace gea
