/* 8 Fused: batch norm's scale and shift, and ReLU, are applied before outputs leave the registers.
   Alone, each of these passes reads and writes all outputs, and computes next to nothing: one pass
   for both took 6 % of the time of rung 7 where this was measured, two take twice that. Here they
   cost three instructions for each vector of outputs, in `finish` of tiles.h, which the compiler
   places between the transform and the store. */
#include "conv_7_larger.c"

void conv_norm_relu(const float *x, const float *f, float *y, int n, int h, int w, int c, int o,
                    const float *scale, const float *shift) {
    winograd(x, f, y, n, h, w, c, o, scale, shift);
}
