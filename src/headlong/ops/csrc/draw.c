/* Draws from softmax(scores): the argmax of scores plus Gumbel noise. The noise is sampling/noise.py's, a function of
 * seed, choice, position, stream and token (Philox4x32-10), so nothing is drawn in sequence.
 *
 * The noise -log(-log u) of most tokens cannot win, and one exponential in floats shows that: s + g > best needs u >
 * exp(-exp(s - best)), and that is at least 1 - exp(s - best). */
#include "arithmetic.h"
#include "threads.h"
#include "tokens.h"

enum { QUADS = 64, ROUNDS = 10 };
static const uint64_t MASK = 0xFFFFFFFF, FIRST = 0xD2511F53, SECOND = 0xCD9E8D57;

typedef struct {
    const double *scores; /* [num_rows, size] */
    const int64_t *keys;  /* [num_rows, 4]: seed, choice, position, stream */
    int64_t size, *tokens;
} Draws;

/* Philox4x32-10: four random words for each of QUADS counters from `quad` on, [QUADS, 4]. */
INLINE void words_of(const int64_t *key, int64_t quad, uint32_t *words) {
    uint64_t c0[QUADS], c1[QUADS], c2[QUADS], c3[QUADS];
    uint64_t k0 = (uint64_t)key[0] & MASK, k1 = (uint64_t)(key[0] >> 32);
    for (int i = 0; i < QUADS; i++) {
        c0[i] = (uint64_t)(quad + i);
        c1[i] = (uint64_t)key[2] & MASK;
        c2[i] = (uint64_t)key[1];
        c3[i] = (uint64_t)key[3];
    }
    for (int round = 0; round < ROUNDS; round++) {
        for (int i = 0; i < QUADS; i++) {
            const uint64_t first = c0[i] * FIRST, second = c2[i] * SECOND;
            c0[i] = ((second >> 32) & MASK) ^ c1[i] ^ k0;
            c2[i] = ((first >> 32) & MASK) ^ c3[i] ^ k1;
            c1[i] = second & MASK;
            c3[i] = first & MASK;
        }
        k0 = (k0 + 0x9E3779B9) & MASK;
        k1 = (k1 + 0xBB67AE85) & MASK;
    }
    for (int i = 0; i < QUADS; i++) {
        words[4 * i] = (uint32_t)c0[i];
        words[4 * i + 1] = (uint32_t)c1[i];
        words[4 * i + 2] = (uint32_t)c2[i];
        words[4 * i + 3] = (uint32_t)c3[i];
    }
}

/* The token with the largest noisy score, of equal ones the first; NaN counts as largest. */
INLINE int64_t draw_one(const double *scores, const int64_t *key, int64_t size) {
    uint32_t words[4 * QUADS];
    int32_t can_win[4 * QUADS];
    double best = -INFINITY;
    int64_t token = 0;
    for (int64_t first = 0; first < size; first += 4 * QUADS) {
        const int count = (int)(size - first < 4 * QUADS ? size - first : 4 * QUADS);
        int32_t any = 0;
        for (int i = 0; i < count; i++) any |= !(scores[first + i] == -INFINITY);
        if (!any) continue;
        words_of(key, first / 4, words);
        const double threshold = best == -INFINITY ? -1e300 : best;
        for (int i = 0; i < count; i++) {
            const double above = scores[first + i] - threshold;
            const float max_ratio = exponential(above > 80.0 ? 80.0f : above < -80.0 ? -80.0f : (float)above);
            const float complement = (float)(MASK - words[i]) * 0x1p-32f; /* slightly less than 1 - u */
            can_win[i] = !(complement > max_ratio * 1.001f);
        }
        for (int i = 0; i < count; i++) {
            const double score = scores[first + i];
            if (!can_win[i] || score == -INFINITY) continue;
            if (score != score) return first + i;
            const double noisy = score - log(-log(((double)words[i] + 0.5) * 0x1p-32));
            if (noisy > best) {
                best = noisy;
                token = first + i;
            }
        }
    }
    return token;
}

VECTORISED static void draw_lines(const void *arg, int64_t first, int64_t last) {
    const Draws *d = arg;
    for (int64_t row = first; row < last; row++)
        d->tokens[row] = draw_one(d->scores + row * d->size, d->keys + row * 4, d->size);
}

void headlong_draw(const double *scores, const int64_t *keys, int64_t num_rows, int64_t size, int64_t *tokens,
                   int num_threads) {
    Draws draws = {scores, keys, size, tokens};
    parallel_for(draw_lines, &draws, num_rows, 1, num_threads);
}
