/* The attention core: norms, rotation, pages, softmax, gate. Heads of keys are independent, so each row's are shared
 * among threads; every token is computed alone, in one order, so its bits depend on nothing but its own past. */
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

/* Reads a stored key or value vector in place when it is float, through `buffer` when it is not. */
INLINE const float *cached(const void *cache, int64_t at, int64_t count, int wide, float *buffer) {
    if (wide) return (const float *)cache + at;
    const uint16_t *h = (const uint16_t *)cache + at;
    for (int64_t i = 0; i < count; i++) buffer[i] = from_bf16(h[i]);
    return buffer;
}

INLINE void keep(void *cache, int64_t at, const float *from, int64_t count, int wide) {
    if (wide) {
        memcpy((float *)cache + at, from, count * sizeof(float));
    } else {
        uint16_t *h = (uint16_t *)cache + at;
        for (int64_t i = 0; i < count; i++) h[i] = to_bf16(from[i]);
    }
}

/* The `group` queries that share one key head, so that each key and value is read once. A constant D unrolls the inner
 * loops. */
INLINE void attend(const Attention *net, const float *q, int64_t group, const int64_t *pages, int64_t kv,
                   int64_t length, float *scores, float *out, float *buffer, const int64_t D) {
    const int64_t width = net->padded_dim, page_size = net->page_size;
    const int64_t page_stride = net->kv_heads * page_size * width, head = kv * page_size * width;
    for (int64_t first = 0, page = 0; first < length; first += page_size, page++) {
        const int64_t at = pages[page] * page_stride + head;
        const int64_t count = length - first < page_size ? length - first : page_size;
        for (int64_t p = 0; p < count; p++) {
            const float *k = cached(net->keys, at + p * width, D, net->wide_cache, buffer);
            for (int64_t g = 0; g < group; g++) scores[g * length + first + p] = dot(q + g * D, k, D);
        }
    }
    for (int64_t g = 0; g < group; g++) {
        float *own = scores + g * length, top = -INFINITY, total = 0.0f;
        for (int64_t p = 0; p < length; p++) top = own[p] > top ? own[p] : top;
        for (int64_t p = 0; p < length; p++) own[p] = exponential(own[p] - top);
        for (int64_t p = 0; p < length; p++) total += own[p];
        for (int64_t p = 0; p < length; p++) own[p] /= total;
    }
    for (int64_t i = 0; i < group * D; i++) out[i] = 0.0f;
    for (int64_t first = 0, page = 0; first < length; first += page_size, page++) {
        const int64_t at = pages[page] * page_stride + head;
        const int64_t count = length - first < page_size ? length - first : page_size;
        for (int64_t p = 0; p < count; p++) {
            const float *v = cached(net->values, at + p * width, D, net->wide_cache, buffer);
            for (int64_t g = 0; g < group; g++) {
                float weight = scores[g * length + first + p], *own = out + g * D;
                for (int64_t d = 0; d < D; d++) own[d] += weight * v[d];
            }
        }
    }
}

/* Head h of a line (queries, then keys) as it meets others: normed, or a query scaled and a key as it is, and rotated. */
INLINE void prepare(const Attention *net, const float *x, int64_t h, const float *cos, const float *sin, float *head,
                    float *out) {
    const int64_t D = net->head_dim, half = net->half;
    if (net->qk_norm) {
        const float *weight = net->qk_norm + h * D;
        float scale = 1.0f / sqrtf(dot(x, x, D) + net->qk_eps);
        for (int64_t d = 0; d < D; d++) head[d] = x[d] * scale * weight[d];
    } else {
        float scale = h < net->heads ? net->q_scale : 1.0f;
        for (int64_t d = 0; d < D; d++) head[d] = x[d] * scale;
    }
    for (int64_t d = 0; d < half; d++) {
        out[d] = head[d] * cos[d] + head[d + half] * sin[d];
        out[d + half] = head[d + half] * cos[d + half] + head[d] * sin[d + half];
    }
    for (int64_t d = 2 * half; d < D; d++) out[d] = head[d];
}

/* All tokens of one row for one key head. A line is queries, keys, gates if there are any, values. */
INLINE void attention_head(const Call *c, int64_t r, int64_t kv) {
    const Attention *net = c->net;
    const int64_t *row = c->step->table + r * ROW_FIELDS, *pages = c->step->pages + r * c->step->pages_width;
    const int64_t D = net->head_dim, H = net->heads, KV = net->kv_heads, group = H / KV, first = kv * group * D;
    const int64_t qk = (H + KV) * D, gates = net->gated ? H * D : 0, width = qk + gates + KV * D;
    float *q = workspace(CORE, (group + 3) * D + group * c->step->longest), *k = q + group * D, *head = k + D;
    float *buffer = head + D, *scores = buffer + D;
    int64_t token = first_token(c->step, r);
    for (int64_t t = 0; t < row[QUERY_LEN]; t++, token++) {
        const int64_t position = row[START] + t;
        const float *x = c->projected + token * width, *cos = c->step->cos + token * D, *sin = c->step->sin + token * D;
        prepare(net, x + (H + kv) * D, H + kv, cos, sin, head, k);
        int64_t place = (pages[position / net->page_size] * KV + kv) * net->page_size + position % net->page_size;
        keep(net->keys, place * net->padded_dim, k, D, net->wide_cache);
        keep(net->values, place * net->padded_dim, x + qk + gates + kv * D, D, net->wide_cache);
        if (!c->result) continue;
        for (int64_t g = 0; g < group; g++) prepare(net, x + first + g * D, kv * group + g, cos, sin, head, q + g * D);
        float *out = c->result + token * H * D + first;
        switch (D) {
#define ATTEND(DIM) attend(net, q, group, pages, kv, position + 1, scores, out, buffer, DIM)
        case 64: ATTEND(64); break;
        case 128: ATTEND(128); break;
        case 256: ATTEND(256); break;
        default: ATTEND(D);
        }
        for (int64_t i = 0; net->gated && i < group * D; i++) out[i] *= sigmoid(x[qk + first + i]);
    }
}

VECTORISED static void attention_heads(const void *given, int64_t first, int64_t last) {
    const Call *c = given;
    for (int64_t i = first; i < last; i++) attention_head(c, i / c->net->kv_heads, i % c->net->kv_heads);
}

void headlong_attention(const Attention *net, const float *projected, float *result, const Step *step) {
    Call call = {net, projected, result, step};
    share(attention_heads, &call, step->rows * net->kv_heads, 1, (int)step->threads);
}
