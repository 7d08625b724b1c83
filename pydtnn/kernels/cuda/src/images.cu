/* Raw images to what a model computes with: cropped, mirrored, cut out, normalised, converted.
 *
 * However many changes there are, all that they do to an image is this: a place of the result shows
 * the pixel whose row differs by a constant and whose column by a constant, counted from the left
 * or from the right; unless it lies outside of one rectangle or inside of one of some others, where
 * it is filled. The first thread of a block works out these numbers for the block's image, from the
 * last change back to the first. Then every thread makes 16 bytes of the output at a time, whatever
 * they are the elements of. Lanes side by side read bytes side by side, so the output, the larger
 * part, is what memory has to carry. Channels are a constant of the compiler's, and so are then the
 * places of coefficients in registers.
 *
 * Everything that is constant from batch to batch comes by value: a graph needs no other memory
 * than that of the images and the random words.
 */
#include "element.cuh"

enum Kind { NOTHING, CROP, FLIP, CUTOUT };
enum { CHANGES = 4 };

/* Vectors that a thread makes: enough to forget the time until the first of them. */
enum { FLIGHT = 4 };

/* Places first ... first + count - 1 along an axis; none if count is not positive. */
struct Span {
    int first, count;
    DEVICE bool has(int place) const { return place >= first && place - first < count; }
    DEVICE Span within(Span other) const {
        const int from = first > other.first ? first : other.first;
        const int end = first + count, other_end = other.first + other.count;
        return {from, (end < other_end ? end : other_end) - from};
    }
};

/* Where places of the result lie in an image, along one axis. */
struct Axis {
    int direction, shift;
    DEVICE int place(int result) const { return direction * result + shift; }
    /* Those places of the result that lie in a span of the image. */
    DEVICE Span seen(Span span) const {
        const int last = span.first + span.count - 1;
        return {direction > 0 ? span.first - shift : shift - last, span.count};
    }
};

/* All that the changes do to one image. */
struct View {
    Axis down, across;
    Span rows, columns;
    bool cut;
    Span cut_rows[CHANGES], cut_columns[CHANGES];
    DEVICE bool shows(int row, int column) const {
        bool shown = rows.has(row) && columns.has(column);
        if (cut) {
#pragma unroll
            for (int i = 0; i < CHANGES; i++) {
                shown = shown && !(cut_rows[i].has(row) && cut_columns[i].has(column));
            }
        }
        return shown;
    }
};

/* An integer of 0 .. n - 1 from a random word: `below` of data/order.py. */
DEVICE index_t below(unsigned word, index_t n) {
    return (index_t)((unsigned long long)word * (unsigned long long)n >> 32);
}

DEVICE index_t at_most(index_t a, index_t b) { return a < b ? a : b; }

/* How far a crop moves an image along an axis: by as much as it is long at most, since then nothing
   is left of it, so that sizes of any number of pixels remain integers of 32 bits. */
DEVICE int moved(unsigned word, index_t padding, int length) {
    const index_t by = below(word, 2 * padding + 1) - padding;
    return (int)(by < -length ? -length : at_most(by, length));
}

/* What a cutout about a place covers of an axis of this length, beyond which it need not reach. */
DEVICE Span about(unsigned word, index_t size, int length) {
    const int count = (int)at_most(size, 2 * (index_t)length + 2);
    return {(int)below(word, length) - count / 2, count};
}

/* What the words of an image make of changes, each given by its kind + 4 size. */
DEVICE View view_of(const index_t (&codes)[CHANGES], const unsigned *words, int height, int width) {
    View view = {{1, 0}, {1, 0}, {0, height}, {0, width}, false, {}, {}};
#pragma unroll
    for (int i = CHANGES - 1; i >= 0; i--) {
        const int kind = (int)(codes[i] & 3);
        const index_t size = codes[i] >> 2;
        if (kind == CROP) {
            view.down.shift += moved(words[4 * i], size, height);
            view.across.shift += moved(words[4 * i + 1], size, width);
            view.rows = view.rows.within(view.down.seen({0, height}));
            view.columns = view.columns.within(view.across.seen({0, width}));
        } else if (kind == FLIP && words[4 * i] >> 31) {
            view.across.direction = -view.across.direction;
            view.across.shift = width - 1 - view.across.shift;
        } else if (kind == CUTOUT) { /* of an even size, one more before the middle than after */
            view.cut = true;
            view.cut_rows[i] = view.down.seen(about(words[4 * i], size, height));
            view.cut_columns[i] = view.across.seen(about(words[4 * i + 1], size, width));
        }
    }
    return view;
}

/* NumPy rounds the product before it adds; a multiply-add in one would not. */
DEVICE float product(float a, float b) { return __fmul_rn(a, b); }
DEVICE double product(double a, double b) { return __dmul_rn(a, b); }

template <class V> DEVICE V pick(int i, V a, V b, V c, V d) {
    return i == 0 ? a : i == 1 ? b : i == 2 ? c : d;
}

template <class T, int C, bool WIDE>
DEVICE void prepare(const unsigned char *x, const unsigned *words, const index_t (&codes)[CHANGES],
                    int drawn, unsigned fill, const double (&scales)[4], const double (&shifts)[4],
                    T *out, int height, int width, int blocks) {
    typedef real<T> R;
    enum { N = WIDE ? (int)Width<T>::FLAT : 1, BLOCK = THREADS * FLIGHT };
    __shared__ View shared;
    const index_t image = blockIdx.x / blocks;
    if (threadIdx.x == 0) shared = view_of(codes, words + image * drawn, height, width);
    __syncthreads();
    const View view = shared;

    const int size = height * width * C, part = (int)(blockIdx.x % blocks) * BLOCK;
    const unsigned char *raw = x + image * size;
    for (int v = part + threadIdx.x; v < part + BLOCK && v * N < size; v += THREADS) {
        const unsigned pixel = v * N / C, start = v * N % C;
        R scale[C], shift[C];
        unsigned colour[C]; /* of channel (start + i) % C */
#pragma unroll
        for (int i = 0; i < C; i++) {
            const int channel = (start + i) % C;
            scale[i] = (R)pick(channel, scales[0], scales[1], scales[2], scales[3]);
            shift[i] = (R)pick(channel, shifts[0], shifts[1], shifts[2], shifts[3]);
            colour[i] = fill >> 8 * channel & 255;
        }
        int row = pixel / (unsigned)width, column = pixel - row * width, channel = start;
        R y[N];
#pragma unroll
        for (int e = 0; e < N; e++) {
            const int from = view.down.place(row) * width + view.across.place(column);
            const unsigned value =
                view.shows(row, column) ? raw[from * C + channel] : colour[e % C];
            y[e] = product((R)value, scale[e % C]) + shift[e % C];
            if (++channel == C) {
                channel = 0;
                if (++column == width) {
                    column = 0;
                    row++;
                }
            }
        }
        store<N>(y, out + image * size + v * N);
    }
}

#define CHANNELS(T, WIDTH, WIDE, C)                                                                \
    KERNEL(prepare##C##_##WIDTH##_##T)                                                             \
    (const unsigned char *x, const unsigned *words, index_t change0, index_t change1,              \
     index_t change2, index_t change3, index_t drawn, index_t fill, double scale0, double scale1,  \
     double scale2, double scale3, double shift0, double shift1, double shift2, double shift3,     \
     T *out, index_t height, index_t width, index_t blocks) {                                      \
        prepare<T, C, WIDE>(x, words, {change0, change1, change2, change3}, (int)drawn,            \
                            (unsigned)fill, {scale0, scale1, scale2, scale3},                      \
                            {shift0, shift1, shift2, shift3}, out, (int)height, (int)width,        \
                            (int)blocks);                                                          \
    }

#define WIDTHS(T, WIDTH, WIDE)                                                                     \
    CHANNELS(T, WIDTH, WIDE, 1)                                                                    \
    CHANNELS(T, WIDTH, WIDE, 2)                                                                    \
    CHANNELS(T, WIDTH, WIDE, 3)                                                                    \
    CHANNELS(T, WIDTH, WIDE, 4)

#define DEFINE(T)                                                                                  \
    WIDTHS(T, wide, true)                                                                          \
    WIDTHS(T, single, false)

ELEMENTS(DEFINE)
