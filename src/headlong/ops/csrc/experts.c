/* Mixture of experts: routing, the routed experts and the shared expert, added to a residual.
 *
 * Only routed experts are multiplied, each for all of its tokens at once. A token's experts are added in ascending
 * order whatever other tokens there are, so its bits depend on its own row alone.
 *
 * Legend. A pair is a token and one of its experts; pairs of a token follow one another, its experts in ascending
 * order. logits [num_tokens, num_experts], and after them the shared expert's gate if it has one; outputs [pairs +
 * num_tokens, hidden_size], in the order of experts, then the shared expert's. */
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

static const float SMALL = 1e-20f; /* added to a sum of sigmoids, which may all be zero */

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

INLINE int64_t logits_of_token(const Experts *net) { return net->num_experts + (net->shared == GATED); }

/* Finds the `wanted` largest of scores[begin..end), in descending order, each behind those that are not smaller: of
 * equal ones the first. `found` of them are known from scores before `begin`; returns how many are known now. */
INLINE int64_t find_best(const float *scores, int64_t begin, int64_t end, int32_t *best, int64_t found,
                         int64_t wanted) {
    for (int64_t e = begin; e < end; e++) {
        if (found == wanted && !(scores[e] > scores[best[found - 1]])) continue;
        int64_t at = found < wanted ? found++ : wanted - 1;
        for (; at > 0 && scores[e] > scores[best[at - 1]]; at--) best[at] = best[at - 1];
        best[at] = (int32_t)e;
    }
    return found;
}

INLINE void sort_ascending(int32_t *numbers, int64_t count) {
    for (int64_t a = 1; a < count; a++) {
        const int32_t own = numbers[a];
        int64_t at = a;
        for (; at > 0 && numbers[at - 1] > own; at--) numbers[at] = numbers[at - 1];
        numbers[at] = own;
    }
}

/* Finds the best experts of the groups with the largest sums of two. `room` has a float and a number for each group. */
INLINE void find_in_groups(const Experts *net, const float *choice, float *room, int32_t *expert) {
    const int64_t groups = net->num_groups, size = net->num_experts / groups;
    float *sums = room;
    int32_t *kept = (int32_t *)(room + groups), pair[2];
    for (int64_t g = 0; g < groups; g++) {
        find_best(choice, g * size, (g + 1) * size, pair, 0, 2);
        sums[g] = choice[pair[0]] + choice[pair[1]];
    }
    find_best(sums, 0, groups, kept, 0, net->kept_groups);
    sort_ascending(kept, net->kept_groups);
    int64_t found = 0;
    for (int64_t k = 0; k < net->kept_groups; k++)
        found = find_best(choice, kept[k] * size, (kept[k] + 1) * size, expert, found, net->num_active);
}

/* Chooses experts, of equal ones the first, and weights them; ops/moe/routing.py has the definition. Softmax keeps the
 * order of logits, so without a bias these are compared, and with `normalise` only the chosen ones are summed up. */
VECTORISED static void route_tokens(const void *arg, int64_t begin, int64_t end) {
    const Slab *s = arg;
    const Experts *net = s->net;
    const int64_t count = net->num_experts, active = net->num_active, groups = net->num_groups;
    float *scored = workspace(CHOICES, count + 2 * groups);
    for (int64_t token = begin; token < end; token++) {
        const float *logits = s->logits + token * logits_of_token(net), *choice = logits;
        int32_t *expert = s->expert + token * active;
        float *weight = s->weight + token * active, top = logits[0], sum = 0.0f, all = 0.0f;
        for (int64_t e = 1; e < count; e++) top = logits[e] > top ? logits[e] : top;
        if (net->sigmoid_scores) {
            for (int64_t e = 0; e < count; e++) scored[e] = sigmoid(logits[e]);
            choice = scored;
        } else if (net->bias || groups > 1 || !net->normalise) {
            for (int64_t e = 0; e < count; e++) all += exponential(logits[e] - top);
            if (net->bias || groups > 1) {
                for (int64_t e = 0; e < count; e++) scored[e] = exponential(logits[e] - top) / all;
                choice = scored;
            }
        }
        if (net->bias)
            for (int64_t e = 0; e < count; e++) scored[e] += net->bias[e];
        if (groups > 1)
            find_in_groups(net, choice, scored + count, expert);
        else
            find_best(choice, 0, count, expert, 0, active);
        sort_ascending(expert, active);
        for (int64_t a = 0; a < active; a++)
            weight[a] = net->sigmoid_scores ? sigmoid(logits[expert[a]]) : exponential(logits[expert[a]] - top);
        if (net->normalise) {
            for (int64_t a = 0; a < active; a++) sum += weight[a];
            if (net->sigmoid_scores) sum += SMALL;
        } else {
            sum = net->sigmoid_scores ? 1.0f : all;
        }
        for (int64_t a = 0; a < active; a++) weight[a] /= sum;
        if (net->scale != 1.0f)
            for (int64_t a = 0; a < active; a++) weight[a] *= net->scale;
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
    headlong_silu_mul(both, gated, num_rows, inner, &s->net->activation, num_threads);
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
        if (s->net->shared == GATED) {
            const float gate = sigmoid(s->logits[token * logits_of_token(s->net) + s->net->num_experts]);
            for (int64_t i = 0; i < size; i++) sum[i] *= gate;
        } else if (s->net->shared == NO_SHARED) {
            memset(sum, 0, size * sizeof *sum);
        }
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
    if (net->shared != NO_SHARED)
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
        run_slab(net, x + begin * net->hidden_size, logits + begin * logits_of_token(net),
                 out + begin * net->hidden_size, begin + SLAB < num_tokens ? SLAB : num_tokens - begin, num_threads);
}
