/* The phases of a stride of 2, by which Winograd's algorithm convolves with it, and the parts of
 * long filters.
 *
 * With a stride of 2, outputs read even pixels by the even taps of a filter and odd pixels by the
 * odd ones: along each axis a convolution is the sum of two of stride 1, of about half the taps. So
 * an image is 2 x 2 phases, each with a filter of taps x taps, 2 for 3x3, 3 for 5x5 and 4 for 7x7,
 * whose tiles are F(4x4, 2x2), F(4x4, 3x3) and F(3x3, 4x4). All phases have the same points, so
 * they are added as products: four times as many inputs. In backward of data the phases are those
 * of the result: four times as many outputs. (Huang et al., "DWM: a decomposable Winograd method
 * for convolution acceleration", AAAI 2020, add the results instead.)
 *
 * One phase along an axis has a tap less, so at one point, infinity or 0, its filter is 0. There
 * remain 9 of 10 products along an axis for 3x3, 81 for 16 outputs instead of 144, and 11 of 12 for
 * 7x7, 121 for 9 outputs instead of 441. (0 is not among five points, which is why backward of data
 * with an even padding has all 100.)
 *
 * Parts of filters are added as products, too. Lines of 7 taps are 4 taps and, 4 pixels further, 3
 * taps: by F(5, 4) 15 products for 5 outputs instead of 35, with 2.4 to 2.7 times the error of the
 * direct algorithm. (F(4, 7) has 10 products for 4, but twice the error; F(2, 7) has 8 for 2 and a
 * tenth more error.) 5 taps are 3 and 2: by F(4x4, 3x3) filters of 5x5 have 121 products for 16
 * outputs instead of 400.
 */
#ifndef PYDTNN_CONV_WINOGRAD_PHASES_H
#define PYDTNN_CONV_WINOGRAD_PHASES_H

#include <stdint.h>

#include "conv_winograd_parts.h"

enum { MOST_IN_ALL = MOST_PHASES * MOST_PHASES };

/* Along an axis: how many phases or parts there are, where tiles begin to read, and the taps of
 * each, -1 if it has fewer. */
struct phase_axis {
    int count;
    ptrdiff_t first;
    int tap[MOST_PHASES][MOST_TAPS];
};

INLINE struct phase_axis axis_of(const struct conv_shape *s, enum gather gather, int d,
                                 struct tile tile) {
    const int kernel = (int)s->kernel[d], stride = (int)s->stride[d];
    const int forward = gather == GATHER_INPUT, taps = taps_along(tile, d);
    struct phase_axis axis = {.count = stride * (reach_along(tile, d) / taps)};
    int offset[MOST_PHASES]; /* of the last input that a phase reads, from the pixel */
    axis.first = forward ? -s->padding[d] : PTRDIFF_MAX;
    for (int phase = 0; phase < stride && !forward; phase++) {
        const int place = phase + (int)s->padding[d], own = (kernel - place % stride - 1) / stride;
        offset[phase] = place / stride;
        axis.first = smaller(axis.first, offset[phase] - own);
    }
    for (int k = 0; k < axis.count; k++) {
        const int phase = k % stride, place = phase + (int)s->padding[d];
        for (int j = 0; j < taps; j++) {
            const int i = k / stride * taps + j;
            const int number = forward ? i : (int)(offset[phase] - axis.first) - i;
            const int tap = number * stride + (forward ? phase : place % stride);
            axis.tap[k][j] = tap < 0 || tap >= kernel ? -1 : tap;
        }
    }
    return axis;
}

/* Phases that follow each other. */
struct runs {
    int count;
    struct range of[MOST_PHASES];
};

/* The phases or parts, `across` in a row, with their filters, those whose filters are not 0 in a
 * matrix, and the matrices. */
struct phases {
    int count, across;
    ptrdiff_t first[2];
    struct filter_view view[MOST_IN_ALL];
    struct runs runs[MOST_MATRICES];
    enum place_of_matrix place[MOST_MATRICES];
};

/* Whether a phase has a filter that is not 0 at a point: 0 takes the first tap, infinity the last.
 */
INLINE int has_point(const int *tap, int point, int points, int taps) {
    return !(point == 0 && points != 5 && tap[0] < 0) &&
           !(point == points - 1 && tap[taps - 1] < 0);
}

INLINE struct phases phases_of(const struct conv_shape *s, enum gather gather, struct tile tile) {
    const int high = taps_along(tile, 0), wide = taps_along(tile, 1);
    const int across = points_of(tile.columns, wide), down = points_of(tile.rows, high);
    const int forward = gather == GATHER_INPUT;
    const ptrdiff_t depth = s->kernel[0] * s->kernel[1] * s->channels;
    const struct phase_axis rows = axis_of(s, gather, 0, tile);
    const struct phase_axis columns = axis_of(s, gather, 1, tile);
    struct phases p = {.count = rows.count * columns.count,
                       .across = columns.count,
                       .first = {rows.first, columns.first}};
    for (int m = 0; m < down * across; m++) {
        const int last_row = high > 1 && m / across == down - 1;
        const int last_column = wide > 1 && m % across == across - 1;
        p.place[m] = last_row ? (last_column ? LAST_BOTH : LAST_ROW)
                              : (last_column ? LAST_COLUMN : INNER);
    }
    for (int k = 0; k < p.count; k++) {
        const int *row = rows.tap[k / columns.count], *column = columns.tap[k % columns.count];
        struct filter_view *view = &p.view[k];
        *view = (struct filter_view){.in = forward ? s->channels : s->filters,
                                     .out = forward ? s->filters : s->channels,
                                     .inner = forward ? 1 : depth,
                                     .outer = forward ? depth : 1};
        for (int t = 0; t < high * wide; t++) {
            const int i = row[t / wide], j = column[t % wide];
            view->tap[t] = i < 0 || j < 0 ? -1 : (i * s->kernel[1] + j) * s->channels;
        }
        for (int m = 0; m < down * across; m++) {
            struct runs *runs = &p.runs[m];
            const int last = runs->count - 1;
            if (!has_point(row, m / across, down, high) ||
                !has_point(column, m % across, across, wide))
                continue;
            if (last >= 0 && runs->of[last].first + runs->of[last].count == k) {
                runs->of[last].count++;
            } else {
                runs->of[runs->count++] = (struct range){k, 1};
            }
        }
    }
    return p;
}

/* Of `channels` each: those of less than a vector are multiplied at once, zeros or not. */
INLINE struct runs runs_of(const struct phases *p, int matrix, ptrdiff_t channels) {
    return channels < LANES ? (struct runs){1, {{0, p->count}}} : p->runs[matrix];
}

#endif
