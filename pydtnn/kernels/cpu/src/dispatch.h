/* Which variants exist.
 *
 * DECLARE_FAMILY(linear) declares the table `struct linear_kernels` of every variant that setup.py
 * built (BUILT_AVX2, BUILT_F32, ... say which) and the function linear_select(isa, itemsize) that
 * returns one of them, or NULL; DECLARE_STORED_FAMILY the same for a family that also has a variant
 * for arrays of bfloat16 (itemsize 2), and DECLARE_MULTIPLYING_FAMILY for one whose kernels of
 * bfloat16 use the tile registers of AMX. Table functions take `void *` so that one struct, and one
 * Cython wrapper, serves all types; the templates assign these to `real *` or `stored *` first
 * thing. avx512_bf16 differs from avx512 only in the kernels of bfloat16, amx from avx512_bf16 only
 * in those that multiply. amx_emulated is amx with instructions emulated, for tests. Some sets were
 * built without float64 (BUILT_AVX2_F64, ... say which have it): isa_of_doubles(isa) is the widest
 * that has it among those that a CPU with `isa` runs.
 */
#ifndef PYDTNN_DISPATCH_H
#define PYDTNN_DISPATCH_H

#include <stddef.h>

enum {
    ISA_GENERIC = 0,
    ISA_AVX2 = 1,
    ISA_AVX512 = 2,
    ISA_AVX512_BF16 = 3,
    ISA_AMX = 4,
    ISA_AMX_EMULATED = 5
};

#ifdef BUILT_GENERIC
#define WITH_GENERIC(...) __VA_ARGS__
#else
#define WITH_GENERIC(...)
#endif
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

#ifdef BUILT_AMX
#define WITH_AMX(...) __VA_ARGS__
#else
#define WITH_AMX(...)
#endif
#ifdef BUILT_AMX_EMULATED
#define WITH_AMX_EMULATED(...) __VA_ARGS__
#else
#define WITH_AMX_EMULATED(...)
#endif

#ifdef BUILT_F32
#define WITH_F32(...) __VA_ARGS__
#else
#define WITH_F32(...)
#endif
#ifdef BUILT_GENERIC_F64
#define WITH_GENERIC_F64(...) __VA_ARGS__
#else
#define WITH_GENERIC_F64(...)
#endif
#ifdef BUILT_AVX2_F64
#define WITH_AVX2_F64(...) __VA_ARGS__
#else
#define WITH_AVX2_F64(...)
#endif
#ifdef BUILT_AVX512_F64
#define WITH_AVX512_F64(...) __VA_ARGS__
#else
#define WITH_AVX512_F64(...)
#endif
#ifdef BUILT_BF16
#define WITH_BF16(...) __VA_ARGS__
#else
#define WITH_BF16(...)
#endif

#define DECLARE_REALS(family, isa) \
    extern const struct family##_kernels family##_kernels_##isa##_f32, family##_kernels_##isa##_f64;
#define DECLARE_HALF(family, isa) \
    extern const struct family##_kernels family##_kernels_##isa##_bf16;
#define PICK_FLOAT(family, isa) WITH_F32(if (itemsize == 4) return &family##_kernels_##isa##_f32;)
#define PICK_DOUBLE(family, isa) if (itemsize == 8) return &family##_kernels_##isa##_f64;
#define PICK_HALF(family, isa) \
    WITH_BF16(if (itemsize == 2) return &family##_kernels_##isa##_bf16;)

static inline __attribute__((unused)) int isa_of_doubles(int isa __attribute__((unused))) {
    WITH_AVX512_F64(if (isa >= ISA_AVX512) return ISA_AVX512;)
    WITH_AVX2_F64(if (isa >= ISA_AVX2) return ISA_AVX2;)
    WITH_GENERIC_F64(if (isa >= ISA_GENERIC) return ISA_GENERIC;)
    return -1;
}

#define DECLARE_FAMILY_(family, declare_half, pick_half, declare_amx, pick_amx)        \
    DECLARE_REALS(family, generic)                                                     \
    declare_half(family, generic)                                                      \
    WITH_AVX2(DECLARE_REALS(family, avx2) declare_half(family, avx2))                  \
    WITH_AVX512(DECLARE_REALS(family, avx512) declare_half(family, avx512))            \
    WITH_AVX512_BF16(declare_half(family, avx512_bf16))                                \
    WITH_AMX(declare_amx(family, amx))                                                 \
    WITH_AMX_EMULATED(declare_amx(family, amx_emulated))                               \
    static inline __attribute__((unused)) const struct family##_kernels *family##_select(\
        int isa __attribute__((unused)), int itemsize __attribute__((unused))) {       \
        if (itemsize == 8) isa = isa_of_doubles(isa);                                  \
        WITH_AMX(if (isa == ISA_AMX) {                                                 \
            pick_amx(family, amx)                                                      \
            isa = ISA_AVX512_BF16;                                                     \
        })                                                                             \
        WITH_AMX_EMULATED(if (isa == ISA_AMX_EMULATED) {                               \
            pick_amx(family, amx_emulated)                                             \
            isa = ISA_AVX512_BF16;                                                     \
        })                                                                             \
        WITH_AVX512_BF16(if (isa == ISA_AVX512_BF16) {                                 \
            pick_half(family, avx512_bf16)                                             \
            isa = ISA_AVX512;                                                          \
        })                                                                             \
        WITH_AVX512(if (isa == ISA_AVX512) {                                           \
            PICK_FLOAT(family, avx512)                                                 \
            WITH_AVX512_F64(PICK_DOUBLE(family, avx512))                               \
            pick_half(family, avx512)                                                  \
        })                                                                             \
        WITH_AVX2(if (isa == ISA_AVX2) {                                               \
            PICK_FLOAT(family, avx2)                                                   \
            WITH_AVX2_F64(PICK_DOUBLE(family, avx2))                                   \
            pick_half(family, avx2)                                                    \
        })                                                                             \
        WITH_GENERIC(if (isa == ISA_GENERIC) {                                         \
            PICK_FLOAT(family, generic)                                                \
            WITH_GENERIC_F64(PICK_DOUBLE(family, generic))                             \
            pick_half(family, generic)                                                 \
        })                                                                             \
        return NULL;                                                                   \
    }
#define NOTHING(family, isa)
#define DECLARE_FAMILY(family) DECLARE_FAMILY_(family, NOTHING, NOTHING, NOTHING, NOTHING)
#define DECLARE_STORED_FAMILY(family) \
    DECLARE_FAMILY_(family, DECLARE_HALF, PICK_HALF, NOTHING, NOTHING)
#define DECLARE_MULTIPLYING_FAMILY(family) \
    DECLARE_FAMILY_(family, DECLARE_HALF, PICK_HALF, DECLARE_HALF, PICK_HALF)

#endif
