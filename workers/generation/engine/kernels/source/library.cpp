// What can be asked of the library itself.
#define GEA_EXPORT extern "C" __attribute__((visibility("default")))

// The width of the vectors that the kernels were compiled for: 8 floats, or 1 where the compiler decides.
GEA_EXPORT int gea_vector_width() {
#ifdef __AVX2__
    return 8;
#else
    return 1;
#endif
}
