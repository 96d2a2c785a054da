// What can be asked of the library itself.
#include "export.h"

// The number of floats in the vectors that the kernels were written for, or 1 where the compiler splits them.
GEA_EXPORT int gea_vector_width() {
#ifdef __AVX2__
    return 8;
#else
    return 1;
#endif
}
