/* Mixture of experts: routing, the routed experts and the shared expert, added to a residual.
 *
 * Only routed experts are multiplied, each for all of its tokens at once. A token's experts are added in ascending
 * order whatever other tokens there are, so its bits depend on its own row alone.
 *
 * Legend. A pair is a token and one of its experts; pairs of a token follow one another, its experts in ascending
 * order. logits [num_tokens, num_experts + 1], the last one the shared expert's gate; outputs [pairs + num_tokens,
 * hidden_size], in the order of experts, then the shared expert's. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-associative-math") /* which would treat a NaN among the logits as a number */
#endif
#include "experts.h"

#include "arithmetic.h"
#include "threads.h"
#include "workspace.h"

enum {
    SLAB = 128,      /* tokens whose experts' outputs are held at a time */
    SHARED_ROWS = 8, /* fewer tokens are not worth a second thread, where nothing is multiplied */
};

/* The tokens of one slab; see the legend. */
typedef struct {
    const Experts *net;
    const float *x, *logits;
    int64_t num_tokens;
    int32_t *expert;     /* [pairs] */
    float *weight;       /* [pairs] */
    int32_t *output_row; /* [pairs]: the row of `outputs` of each pair */
    int32_t *token;      /* [pairs]: the token of each row of `outputs` */
    int32_t *first;      /* [num_experts + 1]: the first row of `outputs` of each expert */
    int32_t *used;       /* the experts that have tokens */
    float *outputs;      /* [pairs + num_tokens, hidden_size]; the last ones are the shared expert's */
    float *out;
} Slab;

/* Chooses the experts with the largest logits, of equal ones the first. Weights are those of a softmax over all experts
 * or, with `normalise`, over the chosen ones. */
VECTORISED static void route_tokens(const void *arg, int64_t begin, int64_t end) {
    const Slab *s = arg;
    const int64_t count = s->net->num_experts, active = s->net->num_active;
    for (int64_t token = begin; token < end; token++) {
        const float *logits = s->logits + token * (count + 1);
        int32_t *expert = s->expert + token * active;
        float *weight = s->weight + token * active, top = logits[0], sum = 0.0f;
        for (int64_t e = 1; e < count; e++) top = logits[e] > top ? logits[e] : top;
        /* Insertion sort in descending order: each behind those that are not smaller. */
        int64_t found = 0;
        for (int64_t e = 0; e < count; e++) {
            if (found == active && !(logits[e] > logits[expert[found - 1]])) continue;
            int64_t at = found < active ? found++ : active - 1;
            for (; at > 0 && logits[e] > logits[expert[at - 1]]; at--) expert[at] = expert[at - 1];
            expert[at] = (int32_t)e;
        }
        for (int64_t a = 1; a < active; a++) {
            const int32_t own = expert[a];
            int64_t at = a;
            for (; at > 0 && expert[at - 1] > own; at--) expert[at] = expert[at - 1];
            expert[at] = own;
        }
        for (int64_t a = 0; a < active; a++) weight[a] = exponential(logits[expert[a]] - top);
        if (s->net->normalise)
            for (int64_t a = 0; a < active; a++) sum += weight[a];
        else
            for (int64_t e = 0; e < count; e++) sum += exponential(logits[e] - top);
        for (int64_t a = 0; a < active; a++) weight[a] /= sum;
    }
}

/* Sorts pairs by expert and, within one expert, by token. Returns how many experts have tokens. */
static int64_t order_pairs(const Slab *s) {
    const int64_t count = s->net->num_experts, active = s->net->num_active, pairs = s->num_tokens * active;
    int64_t used = 0;
    memset(s->first, 0, (count + 1) * sizeof *s->first);
    for (int64_t p = 0; p < pairs; p++) s->first[s->expert[p] + 1]++;
    for (int64_t e = 0; e < count; e++) {
        if (s->first[e + 1]) s->used[used++] = (int32_t)e;
        s->first[e + 1] += s->first[e];
    }
    for (int64_t p = 0; p < pairs; p++) {
        s->output_row[p] = s->first[s->expert[p]]++;
        s->token[s->output_row[p]] = (int32_t)(p / active);
    }
    for (int64_t e = count; e > 0; e--) s->first[e] = s->first[e - 1];
    s->first[0] = 0;
    return used;
}

static void gemm_panels(const Linear *linear, const float *x, int64_t num_rows, float *y, int num_threads) {
    for (const Panel *p = linear->panels; p < linear->panels + linear->num_panels; p++)
        gemm(p->w, x, num_rows, y + p->first_out, linear->num_outs, 0, num_threads);
}

/* Runs one expert on the rows of x that `tokens` names or, without it, on the first rows. */
static void run_expert(const Slab *s, const Expert *expert, const int32_t *tokens, int64_t num_rows, float *y,
                       int num_threads) {
    const int64_t size = s->net->hidden_size, inner = expert->gate_up.num_outs / 2;
    float *own = workspace(EXPERT, num_rows * (size + 3 * inner)), *both = own + num_rows * size,
          *gated = both + num_rows * 2 * inner;
    const float *x = s->x;
    if (tokens && num_rows == 1) {
        x += tokens[0] * size;
    } else if (tokens) {
        for (int64_t i = 0; i < num_rows; i++) memcpy(own + i * size, s->x + tokens[i] * size, size * sizeof *own);
        x = own;
    }
    gemm_panels(&expert->gate_up, x, num_rows, both, num_threads);
    headlong_silu_mul(both, gated, num_rows, inner, num_threads);
    gemm_panels(&expert->down, gated, num_rows, y, num_threads);
}

static void run_routed(const Slab *s, int64_t index, int num_threads) {
    const int64_t e = s->used[index], first = s->first[e];
    run_expert(s, s->net->experts + e, s->token + first, s->first[e + 1] - first,
               s->outputs + first * s->net->hidden_size, num_threads);
}

static void run_some(const void *arg, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) run_routed(arg, i, 1);
}

VECTORISED static void add_tokens(const void *arg, int64_t begin, int64_t end) {
    const Slab *s = arg;
    const int64_t size = s->net->hidden_size, active = s->net->num_active;
    for (int64_t token = begin; token < end; token++) {
        float *out = s->out + token * size, *sum = s->outputs + (s->num_tokens * active + token) * size;
        const float gate = sigmoid(s->logits[token * (s->net->num_experts + 1) + s->net->num_experts]);
        for (int64_t i = 0; i < size; i++) sum[i] *= gate;
        for (int64_t p = token * active; p < (token + 1) * active; p++) {
            const float weight = s->weight[p], *y = s->outputs + s->output_row[p] * size;
            for (int64_t i = 0; i < size; i++) sum[i] += weight * y[i];
        }
        for (int64_t i = 0; i < size; i++) out[i] += sum[i];
    }
}

static void run_slab(const Experts *net, const float *x, const float *logits, float *out, int64_t num_tokens,
                     int num_threads) {
    const int64_t pairs = num_tokens * net->num_active, shared = pairs * net->hidden_size;
    float *weight = workspace(ROUTES, 4 * pairs + 2 * net->num_experts + 1);
    int32_t *expert = (int32_t *)weight + pairs, *output_row = expert + pairs, *token = output_row + pairs;
    int32_t *first = token + pairs;
    float *outputs = workspace(OUTPUTS, shared + num_tokens * net->hidden_size);
    Slab s = {net,     x,  logits, num_tokens, expert, weight, output_row, token, first, first + net->num_experts + 1,
              outputs, out};
    run_expert(&s, net->experts + net->num_experts, 0, num_tokens, outputs + shared, num_threads);
    parallel_for(route_tokens, &s, num_tokens, SHARED_ROWS, num_threads);
    const int64_t used = order_pairs(&s), rounds = (used + num_threads - 1) / num_threads;
    /* One expert per thread, if few threads would wait for the last experts; else all threads on each expert. */
    if (4 * used >= 3 * rounds * num_threads)
        parallel_for(run_some, &s, used, 1, num_threads);
    else
        for (int64_t i = 0; i < used; i++) run_routed(&s, i, num_threads);
    parallel_for(add_tokens, &s, num_tokens, SHARED_ROWS, num_threads);
}

void headlong_experts(const Experts *net, const float *x, const float *logits, float *out, int64_t num_tokens,
                     int num_threads) {
    for (int64_t begin = 0; begin < num_tokens; begin += SLAB)
        run_slab(net, x + begin * net->hidden_size, logits + begin * (net->num_experts + 1),
                 out + begin * net->hidden_size, begin + SLAB < num_tokens ? SLAB : num_tokens - begin, num_threads);
}
