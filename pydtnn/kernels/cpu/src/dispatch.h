/* Which variants exist and which the CPU can run.
 *
 * DECLARE_FAMILY(linear) declares the table `struct linear_kernels` of every variant that setup.py
 * built and the function linear_select(isa, itemsize) that returns one of them, or NULL;
 * DECLARE_STORED_FAMILY the same for a family that also has a variant for arrays of bfloat16
 * (itemsize 2). Table functions take `void *` so that one struct, and one Cython wrapper, serves
 * all types; the templates assign these to `real *` or `stored *` first thing. avx512_bf16 differs
 * from avx512 only in the kernels of bfloat16.
 */
#ifndef PYDTNN_DISPATCH_H
#define PYDTNN_DISPATCH_H

#include <stddef.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

enum { ISA_GENERIC = 0, ISA_AVX2 = 1, ISA_AVX512 = 2, ISA_AVX512_BF16 = 3 };

#ifdef BUILT_AVX2
#define WITH_AVX2(...) __VA_ARGS__
#else
#define WITH_AVX2(...)
#endif
#ifdef BUILT_AVX512
#define WITH_AVX512(...) __VA_ARGS__
#else
#define WITH_AVX512(...)
#endif
#ifdef BUILT_AVX512_BF16
#define WITH_AVX512_BF16(...) __VA_ARGS__
#else
#define WITH_AVX512_BF16(...)
#endif

#define DECLARE_REALS(family, isa) \
    extern const struct family##_kernels family##_kernels_##isa##_f32, family##_kernels_##isa##_f64;
#define DECLARE_HALF(family, isa) \
    extern const struct family##_kernels family##_kernels_##isa##_bf16;
#define PICK_REAL(family, isa)                              \
    if (itemsize == 4) return &family##_kernels_##isa##_f32; \
    if (itemsize == 8) return &family##_kernels_##isa##_f64;
#define PICK_HALF(family, isa) \
    if (itemsize == 2) return &family##_kernels_##isa##_bf16;

#define DECLARE_FAMILY_(family, declare_half, pick_half)                                       \
    DECLARE_REALS(family, generic)                                                             \
    declare_half(family, generic)                                                              \
    WITH_AVX2(DECLARE_REALS(family, avx2) declare_half(family, avx2))                          \
    WITH_AVX512(DECLARE_REALS(family, avx512) declare_half(family, avx512))                    \
    WITH_AVX512_BF16(declare_half(family, avx512_bf16))                                        \
    static inline __attribute__((unused)) const struct family##_kernels *family##_select(      \
        int isa, int itemsize) {                                                               \
        WITH_AVX512_BF16(if (isa == ISA_AVX512_BF16) {                                         \
            pick_half(family, avx512_bf16)                                                     \
            isa = ISA_AVX512;                                                                  \
        })                                                                                     \
        WITH_AVX512(if (isa == ISA_AVX512) {                                                   \
            PICK_REAL(family, avx512)                                                          \
            pick_half(family, avx512)                                                          \
        })                                                                                     \
        WITH_AVX2(if (isa == ISA_AVX2) { PICK_REAL(family, avx2) pick_half(family, avx2) })    \
        if (isa == ISA_GENERIC) { PICK_REAL(family, generic) pick_half(family, generic) }      \
        return NULL;                                                                           \
    }
#define NOTHING(family, isa)
#define DECLARE_FAMILY(family) DECLARE_FAMILY_(family, NOTHING, NOTHING)
#define DECLARE_STORED_FAMILY(family) DECLARE_FAMILY_(family, DECLARE_HALF, PICK_HALF)

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
static inline __attribute__((unused)) int has_avx512bf16(void) {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1 << 5);
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
    int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                 __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                 __builtin_cpu_supports("avx512cd");
    WITH_AVX2(if (isa == ISA_AVX2) return avx2;)
    WITH_AVX512(if (isa == ISA_AVX512) return avx512;)
    WITH_AVX512_BF16(if (isa == ISA_AVX512_BF16) return avx512 && has_avx512bf16();)
    (void)avx512;
#endif
    return isa == ISA_GENERIC;
}

#endif
