/* The attention core: norms, rotation, KV pages, softmax, gate. Key heads are independent, so the key heads of all rows
 * are shared among threads; every token is computed alone, in one order, so its bits depend on its own past alone.
 *
 * Legend. D head_dim, H query heads, KV key heads. A projected token is queries [H, D], keys [KV, D], gates [H, D] if
 * there are any, values [KV, D]. */
#include "arithmetic.h"
#include "attend.h"
#include "cores.h"
#include "threads.h"
#include "workspace.h"

typedef struct {
    const Attention *net;
    const float *projected;
    float *result;
    const Step *step;
} Call;

/* Norms and rotates head h of a token (queries, then keys). Without norms, queries are scaled and keys stay as they
 * are. */
INLINE void prepare(const Attention *net, const float *x, int64_t h, const float *cos, const float *sin, float *head,
                    float *out) {
    const int64_t D = net->head_dim, half = net->half_rotary_dim;
    if (net->qk_norm) {
        const float *weight = net->qk_norm + h * D;
        float scale = 1.0f / sqrtf(dot(x, x, D) + net->qk_eps);
        for (int64_t d = 0; d < D; d++) head[d] = x[d] * scale * weight[d];
    } else {
        float scale = h < net->num_heads ? net->q_scale : 1.0f;
        for (int64_t d = 0; d < D; d++) head[d] = x[d] * scale;
    }
    for (int64_t d = 0; d < half; d++) {
        out[d] = head[d] * cos[d] + head[d + half] * sin[d];
        out[d + half] = head[d + half] * cos[d + half] + head[d] * sin[d + half];
    }
    for (int64_t d = 2 * half; d < D; d++) out[d] = head[d];
}

/* Computes all tokens of one row for one key head. */
INLINE void attention_head(const Call *c, int64_t r, int64_t kv) {
    const Attention *net = c->net;
    const int64_t *row = c->step->table + r * ROW_FIELDS, *pages = c->step->pages + r * c->step->stride_pages;
    const int64_t D = net->head_dim, H = net->num_heads, KV = net->num_kv_heads, num_queries = H / KV,
                  first = kv * num_queries * D;
    const int64_t qk = (H + KV) * D, gates = net->gated ? H * D : 0, width = qk + gates + KV * D;
    float *q = workspace(CORE, (num_queries + 3) * D + num_queries * c->step->max_length), *k = q + num_queries * D,
          *head = k + D;
    float *scratch = head + D, *scores = scratch + D;
    const int64_t head_size = net->page_size * net->padded_dim;
    const Pages cache = {net->keys, net->values, kv * head_size, KV * head_size, net->page_size, net->padded_dim,
                         net->is_float};
    const float *sinks = net->sinks ? net->sinks + kv * num_queries : 0;
    int64_t token = first_token(c->step, r);
    for (int64_t t = 0; t < row[QUERY_LEN]; t++, token++) {
        const int64_t position = row[START] + t;
        const int64_t begin = net->window && position >= net->window ? position + 1 - net->window : 0;
        const float *x = c->projected + token * width, *cos = c->step->cos + token * D, *sin = c->step->sin + token * D;
        prepare(net, x + (H + kv) * D, H + kv, cos, sin, head, k);
        int64_t page_slot = (pages[position / net->page_size] * KV + kv) * net->page_size + position % net->page_size;
        store_vector(net->keys, page_slot * net->padded_dim, k, D, net->is_float);
        store_vector(net->values, page_slot * net->padded_dim, x + qk + gates + kv * D, D, net->is_float);
        if (!c->result) continue;
        for (int64_t g = 0; g < num_queries; g++)
            prepare(net, x + first + g * D, kv * num_queries + g, cos, sin, head, q + g * D);
        float *out = c->result + token * H * D + first;
        switch (D) {
#define ATTEND(DIM)                                                                                                    \
    attend_from(&cache, q, num_queries, pages, begin, position + 1, sinks, scores, out, scratch, DIM, DIM)
        case 64: ATTEND(64); break;
        case 128: ATTEND(128); break;
        case 256: ATTEND(256); break;
        default: ATTEND(D);
        }
        for (int64_t i = 0; net->gated && i < num_queries * D; i++) out[i] *= sigmoid(x[qk + first + i]);
    }
}

VECTORISED static void attention_heads(const void *arg, int64_t first, int64_t last) {
    const Call *c = arg;
    for (int64_t i = first; i < last; i++) attention_head(c, i / c->net->num_kv_heads, i % c->net->num_kv_heads);
}

void headlong_attention(const Attention *net, const float *projected, float *result, const Step *step) {
    Call call = {net, projected, result, step};
    parallel_for(attention_heads, &call, step->num_rows * net->num_kv_heads, 1, (int)step->num_threads);
}
