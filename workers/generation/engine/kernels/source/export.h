// What Python may call: C names, no exceptions, 0 or an error code as the result.
#pragma once

#define GEA_EXPORT extern "C" __attribute__((visibility("default")))

namespace gea {

enum Error : int {
    OK = 0,
    OUT_OF_MEMORY = 1,
    BAD_TOKEN = 2,     // a token id outside the vocabulary
    BAD_POSITION = 3,  // a position outside the context
    BAD_BLOCK = 4,     // a block outside the cache, or a block table that is too short
    BAD_SHAPE = 5,     // sizes that contradict each other
};

}  // namespace gea
