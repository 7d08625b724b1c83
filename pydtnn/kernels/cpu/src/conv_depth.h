/* The taps along the depth of a volume, as channels of planes; see conv_depth.c. */
#ifndef PYDTNN_CONV_DEPTH_H
#define PYDTNN_CONV_DEPTH_H

#include "conv.h"
#include "simd.h"

/* `planes` planes from number `first` on, counted over all images. */
void NAME(unfold)(const struct depth_shape *shape, const void *x, ptrdiff_t first,
                  ptrdiff_t planes, void *out, int threads);
/* out = out + the planes, where they were read. */
void NAME(fold)(const struct depth_shape *shape, const void *x, ptrdiff_t first, ptrdiff_t planes,
                void *out, int threads);

#endif
