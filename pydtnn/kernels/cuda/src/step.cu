/* Numbers that steer a training step, all of them float64 in device memory: nobody waits for them.
 *
 * Whether the step goes on, the scale of the loss, by how much gradients are clipped and learning
 * rates scaled, and the running statistics of all batch norms. There is little to compute: what
 * these kernels cost is their launch, so each does all of its work in one.
 */
#include "columns.cuh"
#include "team.cuh"

DEVICE bool is_finite(double x) { return x - x == 0; }

/* alive = alive and all of `totals` finite; go = alive. One block. */
KERNEL(watch_float64)(const double *totals, double *alive, double *go, index_t n) {
    const Team<THREADS> team;
    int wrong = 0;
    for (index_t i = team.lane; i < n; i += THREADS) wrong += !is_finite(totals[i]);
    wrong = team.sum(wrong);
    if (team.lane > 0) return;
    if (wrong) *alive = 0;
    *go = *alive;
}

/* Dynamic scaling of the loss. One thread. */
KERNEL(rescale_float64)(double *scale, double *good, const double *go, double growth,
                        double backoff, index_t interval) {
    const bool grow = *go != 0 && *good + 1 >= interval;
    if (*go == 0 || grow) *scale *= grow ? growth : backoff;
    *good = *go == 0 || grow ? 0 : *good + 1;
}

/* min(1, limit / norm), 1 if the norm is not finite. One thread. */
KERNEL(clip_factor_float64)(double square, const double *square_at, double limit, double *out) {
    const double norm = sqrt(Number{square, square_at}.get());
    *out = norm > limit && is_finite(norm) ? limit / norm : 1;
}

/* lr factor |w| / (|u| + decay |w|), or lr where either norm is 0. One thread. */
KERNEL(trust_float64)(double lr, const double *lr_at, double square_w, const double *square_w_at,
                      double square_u, const double *square_u_at, double factor, double decay,
                      double *out) {
    const double w = sqrt(Number{square_w, square_w_at}.get());
    const double u = sqrt(Number{square_u, square_u_at}.get());
    const double rate = Number{lr, lr_at}.get();
    *out = w != 0 && u != 0 ? rate * (factor * w / (u + decay * w)) : rate;
}

/* Running statistics of a thread's channel, see kernels/reference/norm.py. Channels of a layer
   share its count, so the block that arrives last clears the sums. */
KERNEL(fold_float64)(double *sums, double *running, const index_t *indices, const double *momentum,
                     const double *go, index_t channels, unsigned *arrived) {
    if (*go == 0) return;
    const index_t *const at[3] = {indices, indices + channels, indices + 2 * channels};
    const index_t j = (index_t)blockIdx.x * THREADS + thread_number();
    const double count = j < channels ? sums[at[0][j]] : 0;
    if (count > 0) {
        const double n = count > 1 ? count : 1, mean = sums[at[1][j]] / n;
        const double spread = sums[at[2][j]] / n - mean * mean;
        /* written so that NaN stays NaN */
        const double variance = (spread < 0 ? 0 : spread) * n / (n > 2 ? n - 1 : 1);
        running[j] += momentum[j] * (mean - running[j]);
        running[channels + j] += momentum[j] * (variance - running[channels + j]);
    }
    if (!last_to_arrive(arrived, gridDim.x)) return;
    for (index_t i = thread_number(); i < 3 * channels; i += THREADS) clear(sums + indices[i]);
}
