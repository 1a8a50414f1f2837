/* A layer stack as a list of instructions over buffers of floats [tokens, size], so that a step is one call. The mirror
 * of `Instruction` is in ops/program.py. */
#include "arithmetic.h"
#include "cores.h"
#include "experts.h"
#include "threads.h"
#include "workspace.h"

enum { NORM, MATMUL, SILU_MUL, DELTA_NET, ATTENTION, EXPERTS };
enum { SHARED_ROWS = 8 }; /* fewer rows of a norm or a gate are not worth a second thread */

typedef struct {
    int64_t kind, from, to; /* buffers; to < 0: nothing is wanted but what stays in the state */
    int64_t beside;         /* a second buffer that is read: the logits of experts */
    int64_t size, stride, column; /* what is written of each line of `to`, how far lines are apart, where it begins */
    int64_t add;                  /* a product: to what is there */
    const void *what;       /* Matrix, DeltaNet, Attention, Experts, or a norm's weight */
    double eps;
} Instruction;

typedef struct {
    const float *x, *weight;
    float *out, eps;
    int64_t size, stride;
} Lines;

/* out = x (|x|^2 + eps)^-1/2 weight, per line; see RmsNorm for the folded weight and eps. */
VECTORISED static void norm_lines(const void *given, int64_t first, int64_t last) {
    const Lines *l = given;
    for (int64_t row = first; row < last; row++) {
        const float *x = l->x + row * l->size;
        float scale = 1.0f / sqrtf(dot(x, x, l->size) + l->eps), *out = l->out + row * l->stride;
        for (int64_t i = 0; i < l->size; i++) out[i] = x[i] * scale * l->weight[i];
    }
}

/* out = silu(gate) up, with gate and up side by side in each line. */
VECTORISED static void silu_mul_lines(const void *given, int64_t first, int64_t last) {
    const Lines *l = given;
    for (int64_t row = first; row < last; row++) {
        const float *gate = l->x + row * 2 * l->size, *up = gate + l->size;
        float *out = l->out + row * l->size;
        for (int64_t i = 0; i < l->size; i++) out[i] = silu(gate[i]) * up[i];
    }
}

void headlong_rms_norm(const float *x, const float *weight, float eps, float *out, int64_t rows, int64_t size,
                       int threads) {
    Lines lines = {x, weight, out, eps, size, size};
    share(norm_lines, &lines, rows, SHARED_ROWS, threads);
}

void headlong_silu_mul(const float *gate_up, float *out, int64_t rows, int64_t size, int threads) {
    Lines lines = {gate_up, 0, out, 0.0f, size, size};
    share(silu_mul_lines, &lines, rows, SHARED_ROWS, threads);
}

void headlong_run(const Instruction *program, int64_t count, float *const *buffers, int64_t tokens, const Step *step) {
    const int threads = (int)step->threads;
    for (const Instruction *i = program; i < program + count; i++) {
        const float *from = buffers[i->from];
        float *to = i->to < 0 ? 0 : buffers[i->to];
        switch (i->kind) {
        case NORM: {
            Lines lines = {from, i->what, to + i->column, (float)i->eps, i->size, i->stride};
            share(norm_lines, &lines, tokens, SHARED_ROWS, threads);
            break;
        }
        case MATMUL: multiply(i->what, from, tokens, to + i->column, i->stride, (int)i->add, threads); break;
        case SILU_MUL: headlong_silu_mul(from, to, tokens, i->size, threads); break;
        case DELTA_NET: headlong_delta_net(i->what, from, to, step); break;
        case ATTENTION: headlong_attention(i->what, from, to, step); break;
        case EXPERTS: headlong_experts(i->what, from, buffers[i->beside], to, tokens, threads); break;
        }
    }
}
