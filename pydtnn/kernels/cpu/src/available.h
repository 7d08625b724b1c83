/* Which instruction sets the CPU can run. */
#ifndef PYDTNN_AVAILABLE_H
#define PYDTNN_AVAILABLE_H

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "dispatch.h"

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

/* Whether there is AMX for bfloat16 (the processor: bits 22 and 24; the system saves registers:
 * bits 17 and 18 of XCR0), and Linux lets this process use it, which it must be asked for. */
static inline __attribute__((unused)) int has_amx(void) {
#if defined(__linux__)
    enum { PROCESSOR = 1 << 22 | 1 << 24, SYSTEM = 1 << 17 | 1 << 18, OSXSAVE = 1 << 27 };
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    unsigned a, b, c, d, low, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & OSXSAVE)) return 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & PROCESSOR) != PROCESSOR) return 0;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & SYSTEM) != SYSTEM) return 0;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
    return 0;
#endif
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
    int bf16 = avx512 && has_avx512bf16();
    WITH_AVX512_BF16(if (isa == ISA_AVX512_BF16) return bf16;)
    WITH_AMX_EMULATED(if (isa == ISA_AMX_EMULATED) return bf16;)
    WITH_AMX(if (isa == ISA_AMX) return bf16 && has_amx();)
    (void)bf16;
#endif
    WITH_GENERIC(if (isa == ISA_GENERIC) return 1;)
    return 0;
}

#endif
