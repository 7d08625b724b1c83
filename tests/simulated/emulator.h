/* CUDA C++ on the host, as far as our kernels use it: to test them where there is no GPU.
 *
 * The threads of a block are carried out by fibers of one host thread, which take turns wherever
 * threads must wait for each other; blocks run one after the other. So shared memory is static
 * memory, and what a kernel may not assume, that threads and blocks are in order, is reversed: the
 * last comes first.
 *
 * A fiber that has come to the end of a thread goes on with one that has not begun. So kernels
 * whose threads never wait need a single fiber, and no switch between fibers. Switches are
 * longjmps, which unlike swapcontext make no system call. Where all threads wait and nobody is left
 * to come, the launch ends and says how many they are.
 *
 * No race shows here, since one thread runs at a time. Compiled with WATCHED, all of this is told
 * to `watch.cpp`, which finds them.
 */
#include <csetjmp>
#include <immintrin.h>
#include <ucontext.h>

#include <cmath>
#include <cstring>
#include <vector>

#define __device__
#define __host__
#define __shared__ static
#define __forceinline__ inline
#define __launch_bounds__(...)

#ifdef WATCHED
#define UNWATCHED __attribute__((no_sanitize_thread)) /* its accesses are none of the kernel's */
#define __global__ inline __attribute__((noinline)) /* or shared memory in it is not looked at */
#include "watch.h"
#else
#define __global__
#define UNWATCHED
#define watch_block(...)
#define watch_enter(...)
#define watch_end(...)
#define watch_arrive(...)
#define watch_met(...)
#define watch_stuck(...)
#define watch_fence(...)
#define watch_atomic(...)
#endif

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};
static dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

/* Where in the sources threads meet. */
struct Site {
    const char *file;
    int line;
};
#define SITE (emulator::Site{__FILE__, __LINE__})

enum { STACK = 1 << 16, LANES = 32, NOBODY = -1u, WARPS = 64, BLOCK = -1 };

/* A place where threads wait for each other. */
struct Meeting {
    unsigned arrived, generation;
};

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
static unsigned current, unbegun, unfinished, moves;
static bool abandoned;
static Meeting of_block, of_warp[WARPS];
static double slots[WARPS][LANES];
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
            watch_enter(current, running->stack.data(), STACK);
            entry(entry_arguments);
            watch_end();
            unfinished--;
            moves++;
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

/* The running thread does what must not be done: nobody goes on. */
static void abandon() {
    abandoned = true;
    _longjmp(scheduler, 1);
}

/* Forget threads that wait for ever. */
static void give_up() {
    if (!abandoned) watch_stuck();
    abandoned = false;
    for (Fiber *fiber : fibers) {
        fiber->begun = false;
        fiber->thread = NOBODY;
    }
    of_block = {};
    for (Meeting &meeting : of_warp) meeting = {};
}

/* Returns how many threads have not come to their end. */
static unsigned run_block() {
    unbegun = unfinished = blockDim.x * blockDim.y;
    watch_block(blockIdx.y * gridDim.x + blockIdx.x, unfinished, abandon);
    for (size_t i = 0; unbegun && !abandoned; i++) { /* as many fibers as there are threads that wait */
        if (i == fibers.size()) fibers.push_back(new Fiber);
        resume(fibers[i]);
    }
    while (unfinished) {
        const unsigned before = moves;
        for (Fiber *fiber : fibers) {
            if (fiber->thread == NOBODY) continue;
            running = fiber;
            become(fiber->thread);
            resume(fiber);
            if (abandoned) break;
        }
        if (abandoned || moves == before) {
            give_up();
            break;
        }
    }
    return unfinished;
}

static unsigned warp_size(unsigned warp) {
    const unsigned left = blockDim.x * blockDim.y - warp * LANES;
    return left < LANES ? left : LANES;
}

static void meet(Meeting &meeting, unsigned all, int warp, unsigned mask, Site site) {
    watch_arrive(warp, mask, site.file, site.line);
    const unsigned mine = meeting.generation;
    moves++;
    if (++meeting.arrived == all) {
        meeting = {0, mine + 1};
        watch_met(warp);
    }
    while (meeting.generation == mine) pause();
    watch_enter(current, running->stack.data(), STACK);
}

template <class V>
static V exchange(V value, unsigned from, unsigned mask, Site site) {
    const unsigned warp = current / LANES, all = warp_size(warp);
    std::memcpy(&slots[warp][current % LANES], &value, sizeof value);
    meet(of_warp[warp], all, warp, mask, site);
    if (from < LANES) std::memcpy(&value, &slots[warp][from], sizeof value);
    meet(of_warp[warp], all, warp, mask, site);
    return value;
}

template <class... A, std::size_t... I>
static UNWATCHED void unpack(void (*kernel)(A...), void **arguments, std::index_sequence<I...>) {
    kernel(*static_cast<A *>(arguments[I])...);
}
template <class... A> static void invoke(void (*kernel)(A...), void **arguments) {
    unpack(kernel, arguments, std::index_sequence_for<A...>());
}
template <class... A> static int count(void (*)(A...)) { return sizeof...(A); }

}  // namespace emulator

#define __syncthreads()                                                                            \
    emulator::meet(emulator::of_block, blockDim.x * blockDim.y, emulator::BLOCK, 0, SITE)
#define __threadfence() watch_fence(__FILE__, __LINE__)
#define __shfl_down_sync(mask, value, offset)                                                      \
    emulator::exchange(value, emulator::current % emulator::LANES + (offset), mask, SITE)
#define __shfl_xor_sync(mask, value, lanes)                                                        \
    emulator::exchange(value, (emulator::current % emulator::LANES) ^ (lanes), mask, SITE)

template <class V> static V __ldcg(const V *from) { return *from; }
static inline UNWATCHED unsigned atomicInc(unsigned *to, unsigned most) {
    watch_atomic(to, sizeof *to);
    const unsigned before = *to;
    *to = before >= most ? 0 : before + 1;
    return before;
}
template <class V> static UNWATCHED V atomicExch(V *to, V value) {
    watch_atomic(to, sizeof *to);
    const V before = *to;
    *to = value;
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

/* Returns how many threads wait for others that never come. */
extern "C" unsigned launch(void (*entry)(void **), const unsigned *grid, const unsigned *block,
                           void **arguments) {
    gridDim.x = grid[0];
    gridDim.y = grid[1];
    blockDim.x = block[0];
    blockDim.y = block[1];
    emulator::entry = entry;
    emulator::entry_arguments = arguments;
    for (blockIdx.x = grid[0]; blockIdx.x--;) {
        for (blockIdx.y = grid[1]; blockIdx.y--;) {
            if (const unsigned stuck = emulator::run_block()) return stuck;
        }
    }
    return 0;
}
