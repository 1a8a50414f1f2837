/* The attention core: norms, rotation, KV pages, softmax, gate. Key heads are independent, so the key heads of all rows
 * are shared among threads; every token is computed alone, in one order, so its bits depend on its own past alone.
 *
 * Legend. D head_dim, H query heads, KV key heads. A projected token is queries [H, D], keys [KV, D], gates [H, D] if
 * there are any, values [KV, D]. */
#include "arithmetic.h"
#include "cores.h"
#include "threads.h"
#include "workspace.h"

typedef struct {
    const Attention *net;
    const float *projected;
    float *result;
    const Step *step;
} Call;

/* Reads a stored key or value vector in place when it is float, through `scratch` when it is not. */
INLINE const float *load_vector(const void *cache, int64_t at, int64_t count, int is_float, float *scratch) {
    if (is_float) return (const float *)cache + at;
    const uint16_t *h = (const uint16_t *)cache + at;
    for (int64_t i = 0; i < count; i++) scratch[i] = from_bf16(h[i]);
    return scratch;
}

INLINE void store_vector(void *cache, int64_t at, const float *from, int64_t count, int is_float) {
    if (is_float) {
        memcpy((float *)cache + at, from, count * sizeof(float));
    } else {
        uint16_t *h = (uint16_t *)cache + at;
        for (int64_t i = 0; i < count; i++) h[i] = to_bf16(from[i]);
    }
}

/* The `num_queries` queries that share one key head, so that each key and value is read once. A constant D lets
 * the compiler unroll the inner loops. */
INLINE void attend(const Attention *net, const float *q, int64_t num_queries, const int64_t *pages, int64_t kv,
                   int64_t length, float *scores, float *out, float *scratch, const int64_t D) {
    const int64_t width = net->padded_dim, page_size = net->page_size;
    const int64_t page_stride = net->num_kv_heads * page_size * width, head = kv * page_size * width;
    for (int64_t first = 0, page = 0; first < length; first += page_size, page++) {
        const int64_t at = pages[page] * page_stride + head;
        const int64_t count = length - first < page_size ? length - first : page_size;
        for (int64_t p = 0; p < count; p++) {
            const float *k = load_vector(net->keys, at + p * width, D, net->is_float, scratch);
            for (int64_t g = 0; g < num_queries; g++) scores[g * length + first + p] = dot(q + g * D, k, D);
        }
    }
    for (int64_t g = 0; g < num_queries; g++) {
        float *own = scores + g * length, max_score = -INFINITY, total = 0.0f;
        for (int64_t p = 0; p < length; p++) max_score = own[p] > max_score ? own[p] : max_score;
        for (int64_t p = 0; p < length; p++) own[p] = exponential(own[p] - max_score);
        for (int64_t p = 0; p < length; p++) total += own[p];
        for (int64_t p = 0; p < length; p++) own[p] /= total;
    }
    for (int64_t i = 0; i < num_queries * D; i++) out[i] = 0.0f;
    for (int64_t first = 0, page = 0; first < length; first += page_size, page++) {
        const int64_t at = pages[page] * page_stride + head;
        const int64_t count = length - first < page_size ? length - first : page_size;
        for (int64_t p = 0; p < count; p++) {
            const float *v = load_vector(net->values, at + p * width, D, net->is_float, scratch);
            for (int64_t g = 0; g < num_queries; g++) {
                float weight = scores[g * length + first + p], *own = out + g * D;
                for (int64_t d = 0; d < D; d++) own[d] += weight * v[d];
            }
        }
    }
}

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
    int64_t token = first_token(c->step, r);
    for (int64_t t = 0; t < row[QUERY_LEN]; t++, token++) {
        const int64_t position = row[START] + t;
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
#define ATTEND(DIM) attend(net, q, num_queries, pages, kv, position + 1, scores, out, scratch, DIM)
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
