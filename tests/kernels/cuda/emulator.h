/* CUDA C++ on the host, as far as our kernels use it: to test them where there is no GPU.
 *
 * The threads of a block are contexts of one host thread, which take turns wherever they must wait
 * for each other; blocks run one after the other. So shared memory is static memory, and what a
 * kernel may not assume, that blocks are in order, is reversed: the last block comes first.
 */
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
#define __launch_bounds__(threads)

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};
static dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

enum { STACK = 1 << 16, LANES = 32 };

struct Context {
    ucontext_t state;
    std::vector<char> stack = std::vector<char>(STACK);
    bool done;
};

static std::vector<Context> contexts;
static ucontext_t scheduler;
static unsigned current, block_arrived, block_generation;
static unsigned warp_arrived[64], warp_generation[64];
static double slots[64][LANES];
static void (*entry)(void **);
static void **entry_arguments;

static void pause() { swapcontext(&contexts[current].state, &scheduler); }

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

static void start() {
    entry(entry_arguments);
    contexts[current].done = true;
    pause();
}

static void run_block() {
    const unsigned threads = blockDim.x * blockDim.y;
    for (unsigned t = 0; t < threads; t++) {
        Context &c = contexts[t];
        getcontext(&c.state);
        c.state.uc_stack.ss_sp = c.stack.data();
        c.state.uc_stack.ss_size = c.stack.size();
        c.state.uc_link = nullptr;
        c.done = false;
        makecontext(&c.state, start, 0);
    }
    for (unsigned left = threads; left;) {
        for (unsigned t = threads; t--;) {
            if (contexts[t].done) continue;
            current = t;
            threadIdx.x = t % blockDim.x;
            threadIdx.y = t / blockDim.x;
            swapcontext(&scheduler, &contexts[t].state);
            left -= contexts[t].done;
        }
    }
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
    emulator::contexts.resize(block[0] * block[1]);
    for (blockIdx.x = grid[0]; blockIdx.x--;) {
        for (blockIdx.y = grid[1]; blockIdx.y--;) emulator::run_block();
    }
}
