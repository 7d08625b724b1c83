/* Maximum and mean over windows of images (images, rows, columns, channels).
 *
 * A thread takes 16 bytes of channels at one position of what it writes: of the output in forward,
 * of the input in backward, where it looks for the windows that cover it. So nothing is added
 * atomically, and neighbouring threads read neighbouring channels. Each input is read once from
 * memory and, as windows overlap, again from the caches: the bound is that of copying both arrays.
 * AHEAD neighbours of a window are under way at once.
 *
 *   blockIdx.x   positions and channels of an image: divided once, in 32 bits, by each thread
 *   blockIdx.y   images, in turns where a thread takes several
 */
#include "element.cuh"

typedef unsigned char uint8;
typedef int int32;

enum { AHEAD = 3 };

DEVICE int larger(int a, int b) { return a > b ? a : b; }
DEVICE int smaller(int a, int b) { return a < b ? a : b; }

/* Windows that slide along an axis. */
struct Slide {
    int size, outputs, kernel, stride, before;

    /* inputs of an output: start ... stop - 1, without the padding */
    DEVICE int origin(int output) const { return output * stride - before; }
    DEVICE int start(int output) const { return larger(origin(output), 0); }
    DEVICE int stop(int output) const { return smaller(origin(output) + kernel, size); }

    /* outputs of an input: first ... last */
    DEVICE int first(int input) const {
        const int beyond = input + before - kernel;
        return beyond < 0 ? 0 : beyond / stride + 1;
    }
    DEVICE int last(int input) const { return smaller((input + before) / stride, outputs - 1); }
};

/* Bins that cut an axis into nearly equal parts, which may overlap by one input. Their products fit
   32 bits. */
struct Bins {
    unsigned size, outputs;

    DEVICE int start(int output) const { return (unsigned)output * size / outputs; }
    DEVICE int stop(int output) const {
        return ((unsigned)(output + 1) * size + outputs - 1) / outputs;
    }
    DEVICE int first(int input) const { return (unsigned)input * outputs / size; }
    DEVICE int last(int input) const { return ((unsigned)(input + 1) * outputs - 1) / size; }
};

/* Call step(image, row, column, channel) for each position of a map of these sizes. */
template <int N, class Step>
DEVICE void for_positions(index_t images, int rows, int columns, int channels, Step step) {
    const unsigned packs = channels / N, all = packs * rows * columns;
    const unsigned i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= all) return;
    const unsigned position = i / packs;
    const int channel = (int)(i % packs) * N;
    const int row = position / columns, column = position % columns;
    for (index_t image = blockIdx.y; image < images; image += gridDim.y) {
        step(image, row, column, channel);
    }
}

/* Where N channels at a position are. */
template <class Axis>
DEVICE index_t input_at(const Axis &r, const Axis &c, index_t image, int row, int column,
                        int channels, int channel) {
    return ((image * r.size + row) * c.size + column) * channels + channel;
}
template <class Axis>
DEVICE index_t output_at(const Axis &r, const Axis &c, index_t image, int row, int column,
                         int channels, int channel) {
    return ((image * r.outputs + row) * c.outputs + column) * channels + channel;
}

/* Call step(i, values[N]) for i = first ... last - 1, the elements at line + i pitch. */
template <int N, class T, class Step>
DEVICE void for_line(const T *line, int first, int last, int pitch, Step step) {
    for (int i = first; i < last; i += AHEAD) {
        Pack<T, N> from[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            if (i + k < last) from[k] = fetch<N>(line + (index_t)(i + k) * pitch);
        }
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            real<T> v[N];
            widen<N>(from[k], v);
            if (i + k < last) step(i + k, v);
        }
    }
}

/* The first of equal values wins, NaN over all numbers; padding is not looked at. */
template <class T, class I, int N>
DEVICE void max_forward(const T *x, T *y, I *index, Slide r, Slide c, index_t images,
                        int channels) {
    for_positions<N>(images, r.outputs, c.outputs, channels, [&](index_t image, int row, int column,
                                                                 int channel) {
        real<T> best[N];
        Pack<I, N> which;
#pragma unroll
        for (int n = 0; n < N; n++) {
            best[n] = -(real<T>)__int_as_float(0x7f800000); /* what a window of padding gives */
            which.at[n] = 0;
        }
        bool any = false;
        for (int i = r.start(row); i < r.stop(row); i++) {
            const T *line = x + input_at(r, c, image, i, 0, channels, channel);
            const int tap = (i - r.origin(row)) * c.kernel - c.origin(column);
            for_line<N>(line, c.start(column), c.stop(column), channels,
                        [&](int j, const real<T>(&v)[N]) {
#pragma unroll
                            for (int n = 0; n < N; n++) {
                                if (!any || v[n] > best[n] || (v[n] != v[n] && best[n] == best[n])) {
                                    best[n] = v[n];
                                    which.at[n] = (I)(tap + j);
                                }
                            }
                            any = true;
                        });
        }
        const index_t at = output_at(r, c, image, row, column, channels, channel);
        store<N>(best, y + at);
        put_pack(which, index + at);
    });
}

template <class T, class I, int N>
DEVICE void max_backward(const T *dy, const I *index, T *dx, Slide r, Slide c, index_t images,
                         int channels) {
    for_positions<N>(images, r.size, c.size, channels, [&](index_t image, int row, int column,
                                                           int channel) {
        real<T> sum[N] = {};
        for (int i = r.first(row); i <= r.last(row); i++) {
            for (int j = c.first(column); j <= c.last(column); j++) {
                const int tap = (row - r.origin(i)) * c.kernel + column - c.origin(j);
                const index_t at = output_at(r, c, image, i, j, channels, channel);
                const Pack<I, N> which = fetch<N>(index + at);
                real<T> g[N];
                load<N>(dy + at, g);
#pragma unroll
                for (int n = 0; n < N; n++) sum[n] += which.at[n] == tap ? g[n] : 0;
            }
        }
        store<N>(sum, dx + input_at(r, c, image, row, column, channels, channel));
    });
}

/* `count` inputs share a mean; with 0 those that are no padding. */
template <class T, int N, class Axis>
DEVICE void mean_forward(const T *x, T *y, Axis r, Axis c, index_t images, int channels,
                         int count) {
    for_positions<N>(images, r.outputs, c.outputs, channels, [&](index_t image, int row, int column,
                                                                 int channel) {
        const int first = c.start(column), last = c.stop(column);
        const int height = larger(r.stop(row) - r.start(row), 0), width = larger(last - first, 0);
        const real<T> share = 1 / (real<T>)(count ? count : height * width);
        real<T> sum[N] = {};
        for (int i = r.start(row); i < r.stop(row); i++) {
            const T *line = x + input_at(r, c, image, i, 0, channels, channel);
            for_line<N>(line, first, last, channels, [&](int, const real<T>(&v)[N]) {
#pragma unroll
                for (int n = 0; n < N; n++) sum[n] += v[n];
            });
        }
#pragma unroll
        for (int n = 0; n < N; n++) sum[n] *= share;
        store<N>(sum, y + output_at(r, c, image, row, column, channels, channel));
    });
}

template <class T, int N, class Axis>
DEVICE void mean_backward(const T *dy, T *dx, Axis r, Axis c, index_t images, int channels,
                          int count) {
    for_positions<N>(images, r.size, c.size, channels, [&](index_t image, int row, int column,
                                                           int channel) {
        real<T> sum[N] = {};
        const real<T> constant = 1 / (real<T>)(count ? count : 1);
        for (int i = r.first(row); i <= r.last(row); i++) {
            const int height = r.stop(i) - r.start(i);
            const T *line = dy + output_at(r, c, image, i, 0, channels, channel);
            for_line<N>(line, c.first(column), c.last(column) + 1, channels,
                        [&](int j, const real<T>(&g)[N]) {
                            const int width = c.stop(j) - c.start(j);
                            const real<T> share = count ? constant : 1 / (real<T>)(height * width);
#pragma unroll
                            for (int n = 0; n < N; n++) sum[n] += g[n] * share;
                        });
        }
        store<N>(sum, dx + input_at(r, c, image, row, column, channels, channel));
    });
}

#define SIZES index_t images, index_t channels, index_t rows, index_t columns, index_t out_rows,   \
              index_t out_columns
#define WINDOWS index_t kernel_rows, index_t kernel_columns, index_t stride_rows,                  \
                index_t stride_columns, index_t before_rows, index_t before_columns
#define SLIDES                                                                                     \
    const Slide r = {(int)rows, (int)out_rows, (int)kernel_rows, (int)stride_rows,                 \
                     (int)before_rows};                                                            \
    const Slide c = {(int)columns, (int)out_columns, (int)kernel_columns, (int)stride_columns,     \
                     (int)before_columns};
#define BINS                                                                                       \
    const Bins r = {(unsigned)rows, (unsigned)out_rows};                                           \
    const Bins c = {(unsigned)columns, (unsigned)out_columns};

#define MAXIMUM(T, I, WIDTH, N)                                                                    \
    KERNEL(max_forward_##I##_##WIDTH##_##T)(const T *x, T *y, I *index, SIZES, WINDOWS) {          \
        SLIDES max_forward<T, I, N>(x, y, index, r, c, images, channels);                          \
    }                                                                                              \
    KERNEL(max_backward_##I##_##WIDTH##_##T)                                                       \
    (const T *dy, const I *index, T *dx, SIZES, WINDOWS) {                                         \
        SLIDES max_backward<T, I, N>(dy, index, dx, r, c, images, channels);                       \
    }

#define MEAN(T, WIDTH, N)                                                                          \
    KERNEL(average_forward_##WIDTH##_##T)(const T *x, T *y, SIZES, WINDOWS, index_t count) {       \
        SLIDES mean_forward<T, N>(x, y, r, c, images, channels, count);                            \
    }                                                                                              \
    KERNEL(average_backward_##WIDTH##_##T)(const T *dy, T *dx, SIZES, WINDOWS, index_t count) {    \
        SLIDES mean_backward<T, N>(dy, dx, r, c, images, channels, count);                         \
    }                                                                                              \
    KERNEL(adaptive_forward_##WIDTH##_##T)(const T *x, T *y, SIZES) {                              \
        BINS mean_forward<T, N>(x, y, r, c, images, channels, 0);                                  \
    }                                                                                              \
    KERNEL(adaptive_backward_##WIDTH##_##T)(const T *dy, T *dx, SIZES) {                           \
        BINS mean_backward<T, N>(dy, dx, r, c, images, channels, 0);                               \
    }

#define VARIANTS(T, WIDTH, N)                                                                      \
    MAXIMUM(T, uint8, WIDTH, N)                                                                    \
    MAXIMUM(T, int32, WIDTH, N)                                                                    \
    MEAN(T, WIDTH, N)

#define DEFINE(T)                                                                                  \
    VARIANTS(T, wide, Width<T>::FLAT)                                                              \
    VARIANTS(T, single, 1)

ELEMENTS(DEFINE)
