/* CUDA C++ on the host, as far as our kernels use it: to test them where there is no GPU.
 *
 * The threads of a block are carried out by fibers of one host thread, which take turns wherever
 * threads must wait for each other; blocks run one after the other. So shared memory is static
 * memory, and what a kernel may not assume, that threads and blocks are in order, is reversed: the
 * last comes first.
 *
 * A fiber that has come to the end of a thread goes on with one that has not begun. So kernels
 * whose threads never wait need a single fiber, and no switch between fibers. Switches are
 * longjmps, which unlike swapcontext make no system call.
 */
#include <csetjmp>
#include <immintrin.h>
#include <ucontext.h>

#include <cmath>
#include <cstring>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __shared__ static
#define __forceinline__ inline
#define __launch_bounds__(...)

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};
static dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

enum { STACK = 1 << 16, LANES = 32, NOBODY = -1u };

struct Fiber {
    std::vector<char> stack = std::vector<char>(STACK);
    ucontext_t begin;
    jmp_buf state;
    bool begun = false;
    unsigned thread = NOBODY;
};

static std::vector<Fiber *> fibers; /* they live as long as the process: nobody can free a stack */
static Fiber *running;
static jmp_buf scheduler;
static unsigned current, unbegun, unfinished;
static unsigned block_arrived, block_generation;
static unsigned warp_arrived[64], warp_generation[64];
static double slots[64][LANES];
static void (*entry)(void **);
static void **entry_arguments;

static void pause() {
    if (_setjmp(running->state) == 0) _longjmp(scheduler, 1);
}

static void become(unsigned thread) {
    current = running->thread = thread;
    threadIdx.x = thread % blockDim.x;
    threadIdx.y = thread / blockDim.x;
}

static void live() {
    for (;;) {
        while (unbegun) {
            become(--unbegun);
            entry(entry_arguments);
            unfinished--;
        }
        running->thread = NOBODY;
        pause();
    }
}

static void resume(Fiber *fiber) {
    running = fiber;
    if (_setjmp(scheduler)) return;
    if (fiber->begun) _longjmp(fiber->state, 1);
    fiber->begun = true;
    getcontext(&fiber->begin);
    fiber->begin.uc_stack.ss_sp = fiber->stack.data();
    fiber->begin.uc_stack.ss_size = fiber->stack.size();
    fiber->begin.uc_link = nullptr;
    makecontext(&fiber->begin, live, 0);
    setcontext(&fiber->begin);
}

static void run_block() {
    unbegun = unfinished = blockDim.x * blockDim.y;
    for (size_t i = 0; unbegun; i++) { /* as many fibers as there are threads that wait */
        if (i == fibers.size()) fibers.push_back(new Fiber);
        resume(fibers[i]);
    }
    while (unfinished) {
        for (Fiber *fiber : fibers) {
            if (fiber->thread == NOBODY) continue;
            running = fiber;
            become(fiber->thread);
            resume(fiber);
        }
    }
}

static unsigned warp_size(unsigned warp) {
    const unsigned left = blockDim.x * blockDim.y - warp * LANES;
    return left < LANES ? left : LANES;
}

static void wait(unsigned &arrived, unsigned &generation, unsigned all) {
    const unsigned mine = generation;
    if (++arrived == all) {
        arrived = 0;
        generation++;
        return;
    }
    while (generation == mine) pause();
}

static void wait_warp(unsigned warp) {
    wait(warp_arrived[warp], warp_generation[warp], warp_size(warp));
}

template <class V> static V exchange(V value, unsigned from) {
    const unsigned warp = current / LANES;
    std::memcpy(&slots[warp][current % LANES], &value, sizeof value);
    wait_warp(warp);
    if (from < LANES) std::memcpy(&value, &slots[warp][from], sizeof value);
    wait_warp(warp);
    return value;
}

template <class... A, std::size_t... I>
static void unpack(void (*kernel)(A...), void **arguments, std::index_sequence<I...>) {
    kernel(*static_cast<A *>(arguments[I])...);
}
template <class... A> static void invoke(void (*kernel)(A...), void **arguments) {
    unpack(kernel, arguments, std::index_sequence_for<A...>());
}
template <class... A> static int count(void (*)(A...)) { return sizeof...(A); }

}  // namespace emulator

static inline void __syncthreads() {
    emulator::wait(emulator::block_arrived, emulator::block_generation, blockDim.x * blockDim.y);
}
static inline void __threadfence() {}
template <class V> static V __shfl_down_sync(unsigned, V value, unsigned offset) {
    return emulator::exchange(value, emulator::current % emulator::LANES + offset);
}
template <class V> static V __shfl_xor_sync(unsigned, V value, unsigned mask) {
    return emulator::exchange(value, (emulator::current % emulator::LANES) ^ mask);
}
template <class V> static V __ldcg(const V *from) { return *from; }
static inline unsigned atomicAdd(unsigned *to, unsigned value) {
    const unsigned before = *to;
    *to += value;
    return before;
}
template <class F, class I> static F same_bits(I bits) {
    F value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
static inline float __int_as_float(int bits) { return same_bits<float>(bits); }
static inline float __uint_as_float(unsigned bits) { return same_bits<float>(bits); }
static inline double rsqrt(double x) { return 1 / std::sqrt(x); }
static inline float __fmul_rn(float a, float b) { return a * b; } /* x86-64 alone has no FMA */
static inline double __dmul_rn(double a, double b) { return a * b; }


struct float16;
struct bfloat16;
static float widen(float16 x);
static void narrow(float x, float16 &y);
static void narrow(float x, bfloat16 &y);

extern "C" void launch(void (*entry)(void **), const unsigned *grid, const unsigned *block,
                       void **arguments) {
    gridDim.x = grid[0];
    gridDim.y = grid[1];
    blockDim.x = block[0];
    blockDim.y = block[1];
    emulator::entry = entry;
    emulator::entry_arguments = arguments;
    for (blockIdx.x = grid[0]; blockIdx.x--;) {
        for (blockIdx.y = grid[1]; blockIdx.y--;) emulator::run_block();
    }
}
