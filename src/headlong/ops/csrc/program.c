/* Runs a layer stack as a list of instructions over buffers of floats [num_tokens, size], so that a step is one call.
 * ops/native_program.py mirrors `Instruction`. */
#include "arithmetic.h"
#include "cores.h"
#include "experts.h"
#include "threads.h"
#include "workspace.h"

enum { NORM, MATMUL, SILU_MUL, DELTA_NET, ATTENTION, EXPERTS, LATENT_ATTENTION };
enum { SHARED_ROWS = 8 }; /* fewer rows of a norm or a gate are not worth a second thread */

typedef struct {
    int64_t kind, input, output; /* buffers; output < 0: only the state is wanted */
    int64_t second_input;        /* a second buffer that is read: the logits of EXPERTS, the queries of LATENT_ATTENTION */
    int64_t size, stride_out;    /* of a row of `output`: numbers written, and numbers from one row to the next */
    int64_t first_column;        /* the first number of each row of `output` that is written */
    int64_t add;                 /* whether MATMUL adds to `output` */
    const void *operand;         /* Matrix, DeltaNet, Attention, Experts, LatentAttention, or a norm's weight */
    double eps;
} Instruction;

typedef struct {
    const float *x, *weight;
    float *out, eps;
    int64_t size, stride_out;
    Activation activation;
} Lines;

static const Activation SILU = {1.0f, INFINITY, 0.0f};

/* RMSNorm of each row: out = x (|x|^2 + eps)^-1/2 weight; ops/norm/reference.py derives this weight and eps. */
VECTORISED static void norm_lines(const void *arg, int64_t first, int64_t last) {
    const Lines *l = arg;
    for (int64_t row = first; row < last; row++) {
        const float *x = l->x + row * l->size;
        float scale = 1.0f / sqrtf(dot(x, x, l->size) + l->eps), *out = l->out + row * l->stride_out;
        for (int64_t i = 0; i < l->size; i++) out[i] = x[i] * scale * l->weight[i];
    }
}

/* The gate of an MLP: out = silu(gate) up, with gate and up side by side in each row. */
VECTORISED static void silu_mul_lines(const void *arg, int64_t first, int64_t last) {
    const Lines *l = arg;
    for (int64_t row = first; row < last; row++) {
        const float *gate = l->x + row * 2 * l->size, *up = gate + l->size;
        float *out = l->out + row * l->size;
        for (int64_t i = 0; i < l->size; i++) out[i] = silu(gate[i]) * up[i];
    }
}

/* Any other activation: out = gate sigmoid(alpha gate) (up + plus), of limited gates and ups. */
VECTORISED static void activated_lines(const void *arg, int64_t first, int64_t last) {
    const Lines *l = arg;
    const float alpha = l->activation.alpha, limit = l->activation.limit, plus = l->activation.plus;
    for (int64_t row = first; row < last; row++) {
        const float *gates = l->x + row * 2 * l->size, *ups = gates + l->size;
        float *out = l->out + row * l->size;
        for (int64_t i = 0; i < l->size; i++) {
            float gate = gates[i] > limit ? limit : gates[i], up = ups[i] > limit ? limit : ups[i];
            up = up < -limit ? -limit : up;
            out[i] = gate / (1.0f + exponential(-(alpha * gate))) * (up + plus);
        }
    }
}

void headlong_rms_norm(const float *x, const float *weight, float eps, float *out, int64_t num_rows, int64_t size,
                       int num_threads) {
    Lines lines = {x, weight, out, eps, size, size, SILU};
    parallel_for(norm_lines, &lines, num_rows, SHARED_ROWS, num_threads);
}

void headlong_silu_mul(const float *gate_up, float *out, int64_t num_rows, int64_t size, const Activation *how,
                       int num_threads) {
    const int is_silu = !how || (how->alpha == 1.0f && how->limit == INFINITY && how->plus == 0.0f);
    Lines lines = {gate_up, 0, out, 0.0f, size, size, is_silu ? SILU : *how};
    parallel_for(is_silu ? silu_mul_lines : activated_lines, &lines, num_rows, SHARED_ROWS, num_threads);
}

void headlong_run(const Instruction *program, int64_t num_instructions, float *const *buffers, int64_t num_tokens,
                  const Step *step) {
    const int num_threads = (int)step->num_threads;
    for (const Instruction *i = program; i < program + num_instructions; i++) {
        const float *input = buffers[i->input];
        float *output = i->output < 0 ? 0 : buffers[i->output];
        switch (i->kind) {
        case NORM: {
            Lines lines = {input,   i->operand,    output + i->first_column, (float)i->eps,
                           i->size, i->stride_out, SILU};
            parallel_for(norm_lines, &lines, num_tokens, SHARED_ROWS, num_threads);
            break;
        }
        case MATMUL:
            gemm(i->operand, input, num_tokens, output + i->first_column, i->stride_out, (int)i->add, num_threads);
            break;
        case SILU_MUL: headlong_silu_mul(input, output, num_tokens, i->size, 0, num_threads); break;
        case DELTA_NET: headlong_delta_net(i->operand, input, output, step); break;
        case ATTENTION: headlong_attention(i->operand, input, output, step); break;
        case LATENT_ATTENTION: {
            const float *queries = i->second_input < 0 ? 0 : buffers[i->second_input];
            headlong_latent_attention(i->operand, queries, input, output, step);
            break;
        }
        case EXPERTS:
            headlong_experts(i->operand, input, buffers[i->second_input], output, num_tokens, num_threads);
            break;
        }
    }
}
