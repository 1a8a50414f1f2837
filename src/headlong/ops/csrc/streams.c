/* The mixes of hyper-connections: what of several residual streams goes into a block, what of its output comes back, and
 * what of each stream goes on in each. ops/hyper_connection/reference.py has the definition. A token's sums are its own.
 *
 * Legend. mixes [num_tokens, (2 + S) S]; scale and base [(2 + S) S]; pre and post [num_tokens, S]; comb [num_tokens, S,
 * S], the second index the stream it goes on in. */
#include "arithmetic.h"
#include "threads.h"

enum { SHARED_ROWS = 32 }; /* fewer tokens are not worth a second thread */

typedef struct {
    const float *mixes, *scale, *base;
    float *pre, *post, *comb;
    int64_t num_streams, iterations;
    float eps;
} Mixes;

/* Divides each of `count` runs, of `count` numbers that lie `step` apart, by their sum. Runs begin `next` apart. */
INLINE void normalise(float *comb, int64_t count, int64_t next, int64_t step, float eps) {
    for (int64_t run = 0; run < count; run++) {
        float *own = comb + run * next, sum = 0.0f;
        for (int64_t i = 0; i < count; i++) sum += own[i * step];
        sum += eps;
        for (int64_t i = 0; i < count; i++) own[i * step] /= sum;
    }
}

static void mix_tokens(const void *arg, int64_t first, int64_t last) {
    const Mixes *m = arg;
    const int64_t count = m->num_streams, width = (2 + count) * count;
    for (int64_t token = first; token < last; token++) {
        const float *mixes = m->mixes + token * width;
        float *pre = m->pre + token * count, *post = m->post + token * count, *comb = m->comb + token * count * count;
        for (int64_t i = 0; i < count; i++) {
            pre[i] = sigmoid(mixes[i] * m->scale[i] + m->base[i]) + m->eps;
            post[i] = 2.0f * sigmoid(mixes[count + i] * m->scale[count + i] + m->base[count + i]);
        }
        for (int64_t i = 0; i < count * count; i++) {
            const int64_t at = 2 * count + i;
            comb[i] = mixes[at] * m->scale[at] + m->base[at];
        }
        for (int64_t row = 0; row < count; row++) {
            float *own = comb + row * count, top = own[0];
            for (int64_t i = 1; i < count; i++) top = own[i] > top ? own[i] : top;
            for (int64_t i = 0; i < count; i++) own[i] = exponential(own[i] - top);
        }
        normalise(comb, count, count, 1, 0.0f);
        for (int64_t i = 0; i < count * count; i++) comb[i] += m->eps;
        normalise(comb, count, 1, count, m->eps);
        for (int64_t round = 1; round < m->iterations; round++) {
            normalise(comb, count, count, 1, m->eps);
            normalise(comb, count, 1, count, m->eps);
        }
    }
}

void headlong_stream_mixes(const float *mixes, const float *scale, const float *base, float *pre, float *post,
                           float *comb, int64_t num_tokens, int64_t num_streams, int64_t iterations, float eps,
                           int num_threads) {
    Mixes m = {mixes, scale, base, pre, post, comb, num_streams, iterations, eps};
    parallel_for(mix_tokens, &m, num_tokens, SHARED_ROWS, num_threads);
}
