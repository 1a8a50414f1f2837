/* Only routed experts are multiplied, each for all of its tokens at once. A token's experts are added in ascending order,
 * whoever else is there, so its bits depend on its own row alone. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-associative-math") /* which would take a logit that is no number for one */
#endif
#include "experts.h"

#include "arithmetic.h"
#include "threads.h"
#include "workspace.h"

enum {
    SLAB = 128,      /* tokens whose experts' outputs are held at a time */
    SHARED_ROWS = 8, /* fewer tokens are not worth a second thread, where nothing is multiplied */
};

/* A pair is a token and one of its experts; those of a token follow one another, its experts in ascending order. */
typedef struct {
    const Experts *net;
    const float *x, *logits;
    int64_t tokens;
    int32_t *expert; /* [pairs] */
    float *weight;   /* [pairs] */
    int32_t *line;   /* [pairs]: of `outputs` */
    int32_t *token;  /* [pairs], by lines, which are in the order of experts */
    int32_t *first;  /* [experts + 1]: line of an expert */
    int32_t *busy;   /* experts that have tokens */
    float *outputs;  /* [pairs + tokens, size]; the last ones are of what every token has */
    float *to;
} Slab;

/* The largest logits, the first of equal ones; weights are those of a softmax over all experts or the chosen ones. */
VECTORISED static void route_tokens(const void *given, int64_t begin, int64_t end) {
    const Slab *s = given;
    const int64_t count = s->net->experts, active = s->net->active;
    for (int64_t token = begin; token < end; token++) {
        const float *logits = s->logits + token * (count + 1);
        int32_t *expert = s->expert + token * active;
        float *weight = s->weight + token * active, top = logits[0], sum = 0.0f;
        for (int64_t e = 1; e < count; e++) top = logits[e] > top ? logits[e] : top;
        /* In descending order, each behind those that are not smaller. */
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

/* Lines in the order of experts, within one of tokens. Returns how many experts are busy. */
static int64_t order_pairs(const Slab *s) {
    const int64_t count = s->net->experts, active = s->net->active, pairs = s->tokens * active;
    int64_t busy = 0;
    memset(s->first, 0, (count + 1) * sizeof *s->first);
    for (int64_t p = 0; p < pairs; p++) s->first[s->expert[p] + 1]++;
    for (int64_t e = 0; e < count; e++) {
        if (s->first[e + 1]) s->busy[busy++] = (int32_t)e;
        s->first[e + 1] += s->first[e];
    }
    for (int64_t p = 0; p < pairs; p++) {
        s->line[p] = s->first[s->expert[p]]++;
        s->token[s->line[p]] = (int32_t)(p / active);
    }
    for (int64_t e = count; e > 0; e--) s->first[e] = s->first[e - 1];
    s->first[0] = 0;
    return busy;
}

static void multiply_all(const Linear *linear, const float *x, int64_t rows, float *y, int threads) {
    for (const Panel *p = linear->panels; p < linear->panels + linear->count; p++)
        multiply(p->w, x, rows, y + p->column, linear->outs, 0, threads);
}

/* The rows of x that `tokens` names, or the first ones. */
static void run_expert(const Slab *s, const Expert *expert, const int32_t *tokens, int64_t rows, float *y, int threads) {
    const int64_t size = s->net->size, inner = expert->gate_up.outs / 2;
    float *own = workspace(EXPERT, rows * (size + 3 * inner)), *both = own + rows * size, *gated = both + rows * 2 * inner;
    const float *x = s->x;
    if (tokens && rows == 1) {
        x += tokens[0] * size;
    } else if (tokens) {
        for (int64_t i = 0; i < rows; i++) memcpy(own + i * size, s->x + tokens[i] * size, size * sizeof *own);
        x = own;
    }
    multiply_all(&expert->gate_up, x, rows, both, threads);
    headlong_silu_mul(both, gated, rows, inner, threads);
    multiply_all(&expert->down, gated, rows, y, threads);
}

static void run_routed(const Slab *s, int64_t number, int threads) {
    const int64_t e = s->busy[number], first = s->first[e];
    run_expert(s, s->net->all + e, s->token + first, s->first[e + 1] - first, s->outputs + first * s->net->size, threads);
}

static void run_some(const void *given, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) run_routed(given, i, 1);
}

VECTORISED static void add_tokens(const void *given, int64_t begin, int64_t end) {
    const Slab *s = given;
    const int64_t size = s->net->size, active = s->net->active;
    for (int64_t token = begin; token < end; token++) {
        float *to = s->to + token * size, *sum = s->outputs + (s->tokens * active + token) * size;
        const float open = sigmoid(s->logits[token * (s->net->experts + 1) + s->net->experts]);
        for (int64_t i = 0; i < size; i++) sum[i] *= open;
        for (int64_t p = token * active; p < (token + 1) * active; p++) {
            const float weight = s->weight[p], *y = s->outputs + s->line[p] * size;
            for (int64_t i = 0; i < size; i++) sum[i] += weight * y[i];
        }
        for (int64_t i = 0; i < size; i++) to[i] += sum[i];
    }
}

static void run_slab(const Experts *net, const float *x, const float *logits, float *to, int64_t tokens, int threads) {
    const int64_t pairs = tokens * net->active, shared = pairs * net->size;
    float *weight = workspace(ROUTES, 4 * pairs + 2 * net->experts + 1);
    int32_t *expert = (int32_t *)weight + pairs, *line = expert + pairs, *token = line + pairs, *first = token + pairs;
    float *outputs = workspace(OUTPUTS, shared + tokens * net->size);
    Slab s = {net, x, logits, tokens, expert, weight, line, token, first, first + net->experts + 1, outputs, to};
    run_expert(&s, net->all + net->experts, 0, tokens, outputs + shared, threads);
    share(route_tokens, &s, tokens, SHARED_ROWS, threads);
    const int64_t busy = order_pairs(&s), rounds = (busy + threads - 1) / threads;
    /* An expert for each thread, where few threads wait for the last ones; else all threads for each expert. */
    if (4 * busy >= 3 * rounds * threads)
        share(run_some, &s, busy, 1, threads);
    else
        for (int64_t i = 0; i < busy; i++) run_routed(&s, i, threads);
    share(add_tokens, &s, tokens, SHARED_ROWS, threads);
}

void headlong_experts(const Experts *net, const float *x, const float *logits, float *to, int64_t tokens, int threads) {
    for (int64_t begin = 0; begin < tokens; begin += SLAB)
        run_slab(net, x + begin * net->size, logits + begin * (net->experts + 1), to + begin * net->size,
                 begin + SLAB < tokens ? SLAB : tokens - begin, threads);
}
