/* Tokens chosen, one for each row. */
#ifndef HEADLONG_TOKENS_H
#define HEADLONG_TOKENS_H
#include <stdint.h>

/* The first of the largest; what is no number is larger than all. */
void headlong_best(const float *logits, int64_t rows, int64_t size, int64_t *tokens, int threads);

/* The best of scores plus noise; `keys` are [rows, 4]: seed, choice, position, stream. */
void headlong_draw(const double *scores, const int64_t *keys, int64_t rows, int64_t size, int64_t *tokens, int threads);

#endif
