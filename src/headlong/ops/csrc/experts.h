/* A layer's experts: routing, the routed ones and the one that every token has. The mirrors of these structures are in
 * ops/moe/native.py. */
#ifndef HEADLONG_EXPERTS_H
#define HEADLONG_EXPERTS_H
#include "matmul.h"

/* Outputs of a product from `column` on. */
typedef struct {
    const Matrix *w;
    int64_t column;
} Panel;

typedef struct {
    const Panel *panels;
    int64_t count, outs;
} Linear;

/* down(silu(gate x) up x), with gate and up side by side. */
typedef struct {
    Linear gate_up, down;
} Expert;

typedef struct {
    int64_t experts, active, normalise, size;
    const Expert *all; /* [experts + 1], the last one every token has */
} Experts;

/* Adds to `to` [tokens, size]; `logits` are [tokens, experts + 1], the last one of the gate of what every token has. */
void headlong_experts(const Experts *net, const float *x, const float *logits, float *to, int64_t tokens, int threads);

/* Of program.c. */
void headlong_silu_mul(const float *gate_up, float *out, int64_t rows, int64_t size, int threads);

#endif
