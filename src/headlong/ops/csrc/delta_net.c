/* The DeltaNet core: convolution, gated delta rule with replay, gated norm. Heads are independent, so the heads of all
 * rows are shared among threads; a head takes its tokens one after the other, so bits depend on its own past alone.
 *
 * Legend. K key heads of D columns, H value heads of E columns, C = 2 K D + H E convolution channels, X = D + E + 2
 * numbers of a stored draft: k, v, decay, beta. A projected token (width C + H E + 2 H) is the convolution's inputs,
 * the output gates, then beta and decay of each head before their activations. S [D, E] is the state of a head. */
#include "arithmetic.h"
#include "cores.h"
#include "threads.h"
#include "workspace.h"

typedef struct {
    const DeltaNet *net;
    const float *projected;
    float *result;
    const Step *step;
} Call;

/* The columns of S that are updated at a time: as many as stay in registers. */
enum { COLUMNS = 64 };

/* Updates `width` columns of S, as delta_update does; a constant width keeps the sums in registers. */
INLINE void delta_columns(float *restrict S, int64_t stride, const float *k, const float *v, float decay, float beta,
                          const float *q, float *restrict out, int64_t D, int64_t width) {
    float change[COLUMNS], sum[COLUMNS];
    for (int64_t e = 0; e < width; e++) change[e] = sum[e] = 0.0f;
    for (int64_t d = 0; d < D; d++)
        for (int64_t e = 0; e < width; e++) change[e] += k[d] * S[d * stride + e];
    for (int64_t e = 0; e < width; e++) change[e] = (v[e] - decay * change[e]) * beta;
    for (int64_t d = 0; d < D; d++) {
        float *row = S + d * stride;
        for (int64_t e = 0; e < width; e++) {
            row[e] = decay * row[e] + k[d] * change[e];
            if (q) sum[e] += q[d] * row[e];
        }
    }
    if (q)
        for (int64_t e = 0; e < width; e++) out[e] = sum[e];
}

/* The delta rule: S <- decay S + k (beta (v - decay S'k))', and out = S'q unless q is null. */
INLINE void delta_update(float *S, const float *k, const float *v, float decay, float beta, const float *q,
                         float *out, int64_t D, int64_t E) {
    int64_t e = 0;
    for (; e + COLUMNS <= E; e += COLUMNS)
        delta_columns(S + e, E, k, v + e, decay, beta, q, out + e, D, COLUMNS);
    if (e < E) delta_columns(S + e, E, k, v + e, decay, beta, q, out + e, D, E - e);
}

/* The convolution's input at position `j` of a row: its window first, then the tokens of this step. */
INLINE const float *conv_input(const Call *c, const int64_t *row, int64_t token, int64_t j, int64_t C, int64_t width) {
    const int64_t past = c->net->num_taps - 1;
    if (j >= past) return c->projected + (token + j - past) * width;
    return c->net->windows + (row[SLOT] * c->net->window_size + row[NUM_REPLAY] + j) * C;
}

/* Convolves `count` channels of token t, from channel `first` on, and applies silu. */
INLINE void convolve(const Call *c, const int64_t *row, int64_t token, int64_t t, int64_t C, int64_t width,
                     int64_t first, int64_t count, float *out) {
    for (int64_t i = 0; i < count; i++) out[i] = 0.0f;
    for (int64_t tap = 0; tap < c->net->num_taps; tap++) {
        const float *input = conv_input(c, row, token, t + tap, C, width) + first,
                    *weight = c->net->conv + tap * C + first;
        for (int64_t i = 0; i < count; i++) out[i] += input[i] * weight[i];
    }
    for (int64_t i = 0; i < count; i++) out[i] = silu(out[i]);
}

INLINE void normalise(float *x, int64_t count, float eps) {
    float scale = 1.0f / sqrtf(dot(x, x, count) + eps);
    for (int64_t i = 0; i < count; i++) x[i] *= scale;
}

/* Runs all tokens of one row for one value head: replayed drafts, certain tokens, then this step's drafts on a copy
 * of S. */
INLINE void delta_head(const Call *c, const int64_t *row, int64_t token, int64_t h) {
    const DeltaNet *net = c->net;
    const int64_t D = net->key_dim, E = net->value_dim, X = D + E + 2, H = net->num_value_heads, K = net->num_key_heads;
    const int64_t C = 2 * K * D + H * E, width = C + H * E + 2 * H, certain = row[QUERY_LEN] - row[NUM_DRAFTS];
    const int64_t key_head = net->tiled ? h % K : h / (H / K);
    float *q = workspace(CORE, 2 * D + E + D * E), *k = q + D, *v = k + D, *draft_state = v + E;
    float *S = net->state + (row[SLOT] * H + h) * D * E;
    float *drafts = net->drafts + (row[SLOT] * net->max_drafts * H + h) * X;
    for (int64_t j = 0; j < row[NUM_REPLAY]; j++) {
        const float *x = drafts + j * H * X;
        delta_update(S, x, x + D, x[D + E], x[D + E + 1], 0, v, D, E);
    }
    for (int64_t t = 0; t < row[QUERY_LEN]; t++) {
        convolve(c, row, token, t, C, width, key_head * D, D, q);
        convolve(c, row, token, t, C, width, (K + key_head) * D, D, k);
        convolve(c, row, token, t, C, width, 2 * K * D + h * E, E, v);
        normalise(q, D, net->qk_eps);
        normalise(k, D, net->qk_eps);
        const float *gate = c->projected + (token + t) * width + C, *b = gate + H * E, *a = b + H;
        float decay = expf(net->rate[h] * softplus(a[h] + net->dt_bias[h])), beta = 1.0f / (1.0f + expf(-b[h]));
        if (t == certain) {
            memcpy(draft_state, S, D * E * sizeof(float));
            S = draft_state;
        }
        if (t >= certain) {
            float *draft = drafts + (t - certain) * H * X;
            memcpy(draft, k, D * sizeof(float));
            memcpy(draft + D, v, E * sizeof(float));
            draft[D + E] = decay;
            draft[D + E + 1] = beta;
        }
        float *out = c->result + ((token + t) * H + h) * E;
        delta_update(S, k, v, decay, beta, q, out, D, E);
        float scale = 1.0f / sqrtf(dot(out, out, E) + net->norm_eps);
        for (int64_t e = 0; e < E; e++) out[e] = out[e] * scale * net->norm[e] * silu(gate[h * E + e]);
    }
}

VECTORISED static void delta_heads(const void *arg, int64_t first, int64_t last) {
    const Call *c = arg;
    const int64_t H = c->net->num_value_heads;
    for (int64_t i = first; i < last; i++)
        delta_head(c, c->step->table + i / H * ROW_FIELDS, first_token(c->step, i / H), i % H);
}

/* Stores what the next step's convolution needs, from the front, since a window may be moved onto itself. */
static void keep_windows(const void *arg, int64_t first, int64_t last) {
    const Call *c = arg;
    const DeltaNet *net = c->net;
    const int64_t H = net->num_value_heads, C = 2 * net->num_key_heads * net->key_dim + H * net->value_dim;
    const int64_t width = C + H * net->value_dim + 2 * H;
    for (int64_t r = first; r < last; r++) {
        const int64_t *row = c->step->table + r * ROW_FIELDS, token = first_token(c->step, r);
        float *window = net->windows + row[SLOT] * net->window_size * C;
        for (int64_t j = 0; j < net->num_taps - 1 + row[NUM_DRAFTS]; j++)
            memmove(window + j * C, conv_input(c, row, token, row[QUERY_LEN] - row[NUM_DRAFTS] + j, C, width),
                    C * sizeof(float));
    }
}

void headlong_delta_net(const DeltaNet *net, const float *projected, float *result, const Step *step) {
    Call call = {net, projected, result, step};
    parallel_for(delta_heads, &call, step->num_rows * net->num_value_heads, 1, (int)step->num_threads);
    parallel_for(keep_windows, &call, step->num_rows, 4, (int)step->num_threads);
}
