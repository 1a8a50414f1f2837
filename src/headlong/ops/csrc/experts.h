/* A layer's mixture of experts: routing, the routed experts and the shared expert. ops/moe/native.py mirrors these
 * structures. */
#ifndef HEADLONG_EXPERTS_H
#define HEADLONG_EXPERTS_H
#include "activation.h"
#include "matmul.h"

/* A part of a linear's outputs, from `first_out` on, that one matrix computes. */
typedef struct {
    const Matrix *w;
    int64_t first_out;
} Panel;

typedef struct {
    const Panel *panels;
    int64_t num_panels, num_outs;
} Linear;

/* An expert computes down(activation(gate x, up x)), with gate and up side by side. */
typedef struct {
    Linear gate_up, down;
} Expert;

/* What every token is routed to: nothing, an expert, or an expert behind a gate. */
enum { NO_SHARED, SHARED, GATED };

/* ops/moe/routing.py says what the fields of the routing mean. */
typedef struct {
    int64_t num_experts, num_active, normalise, hidden_size;
    const Expert *experts; /* [num_experts], and the shared expert after them */
    int64_t sigmoid_scores, num_groups, kept_groups, shared;
    const float *bias; /* [num_experts], or null */
    float scale;
    Activation activation;
} Experts;

/* Adds the experts' outputs to `out` [num_tokens, hidden_size]. `logits` are [num_tokens, num_experts], with the shared
 * expert's gate after them where it is GATED. */
void headlong_experts(const Experts *net, const float *x, const float *logits, float *out, int64_t num_tokens,
                      int num_threads);

#endif
