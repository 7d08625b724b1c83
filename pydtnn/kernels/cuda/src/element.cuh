/* Element types, the arithmetic done with them, and vectors of them in memory.
 *
 * Arrays hold float64, float32, or one of the 16-bit types, which are widened to float when they
 * are read and rounded when they are written. Coefficients and sums are never of 16 bits. The
 * 16-bit types are our own, so that the runtime compiler needs no headers.
 */
#pragma once

typedef float float32;
typedef double float64;
struct float16 {
    unsigned short bits;
};
struct bfloat16 {
    unsigned short bits;
};

typedef long long index_t;

/* Call a macro for each element type that is compiled: for ELEMENT, or for all, or for all that
   are computed with. Each source ends so, with the macro that defines its kernels for one type. */
#define DEFINE_FOR(DEFINE, element) DEFINE(element)
#ifdef ELEMENT
#define ELEMENTS(DEFINE) DEFINE_FOR(DEFINE, ELEMENT)
#define REALS(DEFINE) ELEMENTS(DEFINE)
#else
#define REALS(DEFINE) DEFINE(float32) DEFINE(float64)
#define ELEMENTS(DEFINE) REALS(DEFINE) DEFINE(float16) DEFINE(bfloat16)
#endif

#define DEVICE __device__ __forceinline__
#define SHARED __host__ __device__ __forceinline__
#define KERNEL(name) extern "C" __global__ void __launch_bounds__(THREADS) name
/* a kernel of which so many blocks share an SM, and so its registers */
#define KERNEL_OF(blocks, name) extern "C" __global__ void __launch_bounds__(THREADS, blocks) name

enum { THREADS = 256, WARP = 32 };

template <class T> struct Arithmetic {
    typedef float type;
};
template <> struct Arithmetic<float64> {
    typedef double type;
};
template <class T> using real = typename Arithmetic<T>::type;

SHARED float widen(float x) { return x; }
SHARED double widen(double x) { return x; }
#ifdef __CUDACC__ /* the tests have these for another compiler */
DEVICE float widen(float16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
DEVICE void narrow(float x, float16 &y) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); }
DEVICE void narrow(float x, bfloat16 &y) {
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else /* has no instruction for it */
    const unsigned bits = __float_as_uint(x);
    y.bits = x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
#endif
}
DEVICE float widen(bfloat16 x) { /* fewer registers than a shift */
    float y;
    asm("mov.b32 %0, {0, %1};" : "=f"(y) : "h"(x.bits));
    return y;
}
#else
DEVICE float widen(bfloat16 x) { return __uint_as_float((unsigned)x.bits << 16); }
#endif

/* Round to nearest, ties to even. */
template <class T> struct Narrow;
template <> struct Narrow<float32> {
    static __host__ __device__ float32 of(float x) { return x; }
};
template <> struct Narrow<float64> {
    static __host__ __device__ float64 of(double x) { return x; }
};
template <> struct Narrow<float16> {
    static DEVICE float16 of(float x) {
        float16 y;
        narrow(x, y);
        return y;
    }
};
template <> struct Narrow<bfloat16> {
    static DEVICE bfloat16 of(float x) {
        bfloat16 y;
        narrow(x, y);
        return y;
    }
};

/* The value that remains of x when it has been stored. */
template <class T> DEVICE real<T> rounded(real<T> x) { return widen(Narrow<T>::of(x)); }

/* Whether x is above 0, or NaN, when it has been stored: not where it rounds to 0. */
template <class T> DEVICE bool positive(real<T> x) { return !(x <= 0); }
template <> DEVICE bool positive<float16>(float x) { return !(x <= 0x1p-25f); }
template <> DEVICE bool positive<bfloat16>(float x) { return !(x <= 0x1p-134f); }

/* Elements that one access of 16 bytes moves: the most that a thread can ask for at once. */
template <class T> struct Width {
    enum { FLAT = 16 / (int)sizeof(T) };
};

/* Elements as they are in memory. Loads that are to be under way together fetch packs, which take
   no more registers than bytes; they are widened when they are used. Addresses are multiples of 16
   bytes at most, of larger packs, too. */
template <class T, int N> struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Pack {
    T at[N];
};

template <int N, class T> DEVICE Pack<T, N> fetch(const T *from) {
    return *reinterpret_cast<const Pack<T, N> *>(from);
}

/* 16 bytes are written by one instruction, which is spelt out: the compiler would take apart what
   has been put together element by element. */
template <int N, class T> DEVICE void put_pack(const Pack<T, N> &from, T *to) {
#ifdef __CUDACC__
    if constexpr (sizeof(Pack<T, N>) == 16) {
        unsigned w[4];
        memcpy(w, &from, sizeof w);
        asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(w[0]), "r"(w[1]),
                     "r"(w[2]), "r"(w[3])
                     : "memory");
        return;
    }
#endif
    *reinterpret_cast<Pack<T, N> *>(to) = from;
}

template <int N, class T> DEVICE void widen(const Pack<T, N> &from, real<T> (&to)[N]) {
#pragma unroll
    for (int n = 0; n < N; n++) to[n] = widen(from.at[n]);
}

/* Elements of one access where N are moved: at most 16 bytes. */
template <class T, int N> struct Access {
    enum { COUNT = N * (int)sizeof(T) > 16 ? 16 / (int)sizeof(T) : N };
    typedef Pack<T, COUNT> type;
};

template <int N, class T> DEVICE void load(const T *from, real<T> (&to)[N]) {
    typedef Access<T, N> Part;
#pragma unroll
    for (int i = 0; i < N; i += Part::COUNT) {
        const auto pack = *reinterpret_cast<const typename Part::type *>(from + i);
#pragma unroll
        for (int n = 0; n < Part::COUNT; n++) to[i + n] = widen(pack.at[n]);
    }
}

template <int N, class T> DEVICE void store(const real<T> (&from)[N], T *to) {
    typedef Access<T, N> Part;
#pragma unroll
    for (int i = 0; i < N; i += Part::COUNT) {
        typename Part::type pack;
#pragma unroll
        for (int n = 0; n < Part::COUNT; n++) pack.at[n] = Narrow<T>::of(from[i + n]);
        put_pack(pack, to + i);
    }
}

/* Number of this thread in its block, of whatever shape. */
DEVICE int thread_number() { return threadIdx.y * blockDim.x + threadIdx.x; }

/* A compile-time number as an argument. */
template <int N> struct Count {
    enum { value = N };
};

/* A number that may change between replays of a CUDA graph: in device memory, or given by value. */
struct Number {
    double value;
    const double *at;
    __device__ __forceinline__ double get() const { return at ? *at : value; }
};
