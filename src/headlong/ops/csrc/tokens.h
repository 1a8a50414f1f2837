/* Functions that choose one token for each row. */
#ifndef HEADLONG_TOKENS_H
#define HEADLONG_TOKENS_H
#include <stdint.h>

/* The argmax of each row, of equal logits the first; NaN counts as largest. */
void headlong_argmax(const float *logits, int64_t num_rows, int64_t size, int64_t *tokens, int num_threads);

/* The argmax of scores plus noise; `keys` are [num_rows, 4]: seed, choice, position, stream. */
void headlong_draw(const double *scores, const int64_t *keys, int64_t num_rows, int64_t size, int64_t *tokens,
                   int num_threads);

#endif
