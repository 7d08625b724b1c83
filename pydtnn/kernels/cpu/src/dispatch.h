/* Which variants exist and which the CPU can run.
 *
 * DECLARE_FAMILY(linear) declares the table `struct linear_kernels` of every variant that setup.py
 * built and the function linear_select(isa, itemsize) that returns one of them, or NULL. Table
 * functions take `void *` so that one struct, and one Cython wrapper, serves float and double; the
 * templates assign these to `real *` first thing.
 */
#ifndef PYDTNN_DISPATCH_H
#define PYDTNN_DISPATCH_H

#include <stddef.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

enum { ISA_GENERIC = 0, ISA_AVX2 = 1, ISA_AVX512 = 2 };

#define DECLARE_VARIANTS(family, isa) \
    extern const struct family##_kernels family##_kernels_##isa##_f32, family##_kernels_##isa##_f64;
#define PICK_VARIANT(family, isa, itemsize) \
    ((itemsize) == 4 ? &family##_kernels_##isa##_f32 : &family##_kernels_##isa##_f64)

#ifdef BUILT_AVX2
#define DECLARE_AVX2(family) DECLARE_VARIANTS(family, avx2)
#define PICK_AVX2(family, itemsize) PICK_VARIANT(family, avx2, itemsize)
#else
#define DECLARE_AVX2(family)
#define PICK_AVX2(family, itemsize) NULL
#endif

#ifdef BUILT_AVX512
#define DECLARE_AVX512(family) DECLARE_VARIANTS(family, avx512)
#define PICK_AVX512(family, itemsize) PICK_VARIANT(family, avx512, itemsize)
#else
#define DECLARE_AVX512(family)
#define PICK_AVX512(family, itemsize) NULL
#endif

#define DECLARE_FAMILY(family)                                                            \
    DECLARE_VARIANTS(family, generic)                                                     \
    DECLARE_AVX2(family)                                                                  \
    DECLARE_AVX512(family)                                                                \
    static inline __attribute__((unused)) const struct family##_kernels *family##_select( \
        int isa, int itemsize) {                                                          \
        if (itemsize != 4 && itemsize != 8) return NULL;                                  \
        if (isa == ISA_AVX512) return PICK_AVX512(family, itemsize);                      \
        if (isa == ISA_AVX2) return PICK_AVX2(family, itemsize);                          \
        return PICK_VARIANT(family, generic, itemsize);                                   \
    }

#if defined(__x86_64__)
/* Features that __builtin_cpu_supports does not support in all compilers. */
static inline __attribute__((unused)) int has_f16c(void) {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
static inline __attribute__((unused)) int has_lzcnt(void) {
    unsigned a, b, c, d;
    return __get_cpuid(0x80000001, &a, &b, &c, &d) && (c & bit_LZCNT);
}
#endif

/* Whether this build has the instruction set and this CPU, under this operating system, runs it:
 * all that setup.py lets the compiler use. */
static inline __attribute__((unused)) int isa_available(int isa) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c() &&
               __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") && has_lzcnt() &&
               __builtin_cpu_supports("popcnt");
#ifdef BUILT_AVX2
    if (isa == ISA_AVX2) return avx2;
#endif
#ifdef BUILT_AVX512
    if (isa == ISA_AVX512) {
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512cd");
    }
#endif
    (void)avx2;
#endif
    return isa == ISA_GENERIC;
}

#endif
