/* What the instructions of AMX do, for tests: rows and columns outside the configured shape become
 * zeros, and shapes that do not fit end the program, as the processor does. */
#include "amx.h"

#if HAS_AMX && defined(EMULATED_AMX)
struct tile_register {
    uint32_t element[AMX_SIDE][AMX_SIDE];
};
static _Thread_local struct amx_configuration configured;
static _Thread_local struct tile_register registers[8];

static void require(int holds) {
    if (!holds) __builtin_trap();
}

/* A register must have a shape before it is used. */
static ptrdiff_t columns_of(int number) {
    require(configured.palette == 1 && configured.rows[number] > 0 && configured.bytes[number] > 0);
    return configured.bytes[number] / 4;
}

void NAME(emulated_configure)(const struct amx_configuration *configuration) {
    for (int i = 0; i < 16; i++) {
        const int rows = configuration->rows[i], bytes = configuration->bytes[i];
        require(rows <= AMX_SIDE && bytes <= 64 && (rows == 0) == (bytes == 0));
        require(i < 8 || rows == 0);
    }
    configured = *configuration;
    memset(registers, 0, sizeof registers);
}

void NAME(emulated_zero)(int to) {
    columns_of(to);
    memset(&registers[to], 0, sizeof registers[to]);
}

void NAME(emulated_load)(int to, const void *from, ptrdiff_t stride) {
    const size_t bytes = (size_t)columns_of(to) * 4;
    memset(&registers[to], 0, sizeof registers[to]);
    for (ptrdiff_t i = 0; i < configured.rows[to]; i++) {
        memcpy(registers[to].element[i], (const char *)from + i * stride, bytes);
    }
}

void NAME(emulated_store)(int from, void *to, ptrdiff_t stride) {
    const size_t bytes = (size_t)columns_of(from) * 4;
    for (ptrdiff_t i = 0; i < configured.rows[from]; i++) {
        memcpy((char *)to + i * stride, registers[from].element[i], bytes);
    }
}

static float real_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

void NAME(emulated_dot)(int sum, int a, int b) {
    const ptrdiff_t depth = columns_of(a), columns = columns_of(b);
    require(sum != a && sum != b && a != b && depth == configured.rows[b]);
    require(columns == columns_of(sum) && configured.rows[sum] == configured.rows[a]);
    for (ptrdiff_t i = 0; i < configured.rows[a]; i++) {
        for (ptrdiff_t k = 0; k < depth; k++) {
            const uint32_t x = registers[a].element[i][k];
            for (ptrdiff_t j = 0; j < columns; j++) {
                const uint32_t w = registers[b].element[k][j];
                const float first = real_of(x << 16) * real_of(w << 16);
                const float second = real_of(x & 0xffff0000) * real_of(w & 0xffff0000);
                const float value = real_of(registers[sum].element[i][j]) + (first + second);
                memcpy(&registers[sum].element[i][j], &value, sizeof value);
            }
        }
    }
}
#else
typedef int nothing_is_emulated; /* an empty source is no C */
#endif
