/* Fused CPU kernels for what lies between two matmuls: norms, gates, the DeltaNet and the attention core.
 *
 * Plain C behind ctypes; knows no torch. Every token is computed alone, in one order, so its bits depend on
 * nothing but its own past. Activations are float or bfloat16 (`wide` tells: 1 float, 0 bfloat16); arithmetic
 * is float. The Python reference beside each kernel is the specification.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
/* The loader picks the widest version this CPU runs. */
#define VECTORISED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define VECTORISED
#endif
#define INLINE static inline __attribute__((always_inline))

/* Room for `count` floats, kept from call to call: fresh pages at every call would cost more than the work. */
static float *workspace(int64_t count) {
    static _Thread_local float *room;
    static _Thread_local int64_t size;
    if (count > size) {
        free(room);
        room = malloc(count * sizeof(float));
        if (!room) abort();
        size = count;
    }
    return room;
}

INLINE float from_bf16(uint16_t h) {
    uint32_t bits = (uint32_t)h << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

INLINE uint16_t to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
}

INLINE void load(float *to, const void *from, int64_t at, int64_t count, int wide) {
    if (wide) {
        memcpy(to, (const float *)from + at, count * sizeof(float));
    } else {
        const uint16_t *h = (const uint16_t *)from + at;
        for (int64_t i = 0; i < count; i++) to[i] = from_bf16(h[i]);
    }
}

INLINE void store(void *to, int64_t at, const float *from, int64_t count, int wide) {
    if (wide) {
        memcpy((float *)to + at, from, count * sizeof(float));
    } else {
        uint16_t *h = (uint16_t *)to + at;
        for (int64_t i = 0; i < count; i++) h[i] = to_bf16(from[i]);
    }
}

/* e^x for x cut to [-87, 87]: 2^n e^r with |r| <= ln2 / 2, e^r by its series to the seventh power; about one unit
 * in the last place. Cut in integers and without a branch, or the loops around it stay scalar. */
INLINE float exponential(float given) {
    uint32_t bits;
    memcpy(&bits, &given, 4);
    uint32_t size = bits & 0x7FFFFFFF, most = 0x42AE0000; /* 87.0f */
    bits = (bits & 0x80000000) | (size < most ? size : most);
    float x;
    memcpy(&x, &bits, 4);
    int32_t n = (int32_t)(x * 1.44269504f + copysignf(0.5f, x));
    float r = x - (float)n * 0.693147181f;
    float y = 1.0f / 5040.0f;
    y = y * r + 1.0f / 720.0f;
    y = y * r + 1.0f / 120.0f;
    y = y * r + 1.0f / 24.0f;
    y = y * r + 1.0f / 6.0f;
    y = y * r + 0.5f;
    y = y * r + 1.0f;
    y = y * r + 1.0f;
    bits = (uint32_t)(n + 127) << 23;
    float scale;
    memcpy(&scale, &bits, 4);
    return y * scale + (given - given); /* NaN stays NaN */
}

INLINE float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }
INLINE float silu(float x) { return x / (1.0f + exponential(-x)); }
INLINE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

INLINE float dot(const float *a, const float *b, int64_t count) {
    float sum = 0.0f;
    for (int64_t i = 0; i < count; i++) sum += a[i] * b[i];
    return sum;
}

/* out = x (|x|^2 + eps)^-1/2 weight, per row of `size`; see RmsNorm for the folded weight and eps. */
VECTORISED void headlong_rms_norm(const float *x, const float *weight, float eps, void *out, int wide,
                                  int64_t rows, int64_t size) {
    float *scratch = workspace(size);
    for (int64_t row = 0; row < rows; row++) {
        const float *line = x + row * size;
        float scale = 1.0f / sqrtf(dot(line, line, size) + eps);
        for (int64_t i = 0; i < size; i++) scratch[i] = line[i] * scale * weight[i];
        store(out, row * size, scratch, size, wide);
    }
}

/* out = silu(gate) up, with gate and up side by side in each row. */
VECTORISED void headlong_silu_mul(const void *gate_up, void *out, int wide, int64_t rows, int64_t size) {
    float *scratch = workspace(2 * size);
    for (int64_t row = 0; row < rows; row++) {
        load(scratch, gate_up, row * 2 * size, 2 * size, wide);
        for (int64_t i = 0; i < size; i++) scratch[i] = silu(scratch[i]) * scratch[size + i];
        store(out, row * size, scratch, size, wide);
    }
}

/* One row of the table that says what a step feeds. */
enum { SLOT, START, QUERY_LEN, NUM_DRAFTS, NUM_REPLAY, ROW_FIELDS };

typedef struct {
    int64_t key_heads, value_heads, key_dim, value_dim, kernel, window, max_drafts;
    int64_t tiled; /* value head h reads key head h % key_heads, not h / per_key */
    const float *conv, *rate, *dt_bias, *norm; /* [kernel, channels], [heads], [heads], [value_dim] */
    float qk_eps, norm_eps;
    float *memory;  /* [slots, heads, key_dim, value_dim] */
    float *drafts;  /* [slots, max_drafts, heads, key_dim + value_dim + 2] */
    float *windows; /* [slots, window, channels] */
} DeltaNet;

/* Columns of S that are worked on at a time: as many as stay in registers. */
enum { COLUMNS = 64 };

/* `width` columns of delta_update; a constant width lets the sums live in registers. */
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

/* S <- decay S + k (beta (v - decay S'k))', and out = S'q unless q is null. */
INLINE void delta_update(float *S, const float *k, const float *v, float decay, float beta, const float *q,
                         float *out, int64_t D, int64_t E) {
    int64_t e = 0;
    for (; e + COLUMNS <= E; e += COLUMNS)
        delta_columns(S + e, E, k, v + e, decay, beta, q, out + e, D, COLUMNS);
    if (e < E) delta_columns(S + e, E, k, v + e, decay, beta, q, out + e, D, E - e);
}

/* Runs one token: convolved inputs in `mixed` and the token's projections to a normed, gated `out`. */
INLINE void delta_token(const DeltaNet *net, float *S, float *mixed, const float *gate, const float *b,
                        const float *a, float *keep, float *out) {
    const int64_t D = net->key_dim, E = net->value_dim, X = D + E + 2;
    const int64_t per_key = net->value_heads / net->key_heads;
    for (int64_t h = 0; h < 2 * net->key_heads; h++) {
        float *head = mixed + h * D;
        float scale = 1.0f / sqrtf(dot(head, head, D) + net->qk_eps);
        for (int64_t d = 0; d < D; d++) head[d] *= scale;
    }
    for (int64_t h = 0; h < net->value_heads; h++) {
        const float *q = mixed + (net->tiled ? h % net->key_heads : h / per_key) * D, *k = q + net->key_heads * D;
        const float *v = mixed + 2 * net->key_heads * D + h * E;
        float decay = expf(net->rate[h] * softplus(a[h] + net->dt_bias[h]));
        float beta = 1.0f / (1.0f + expf(-b[h])), *o = out + h * E;
        delta_update(S + h * D * E, k, v, decay, beta, q, o, D, E);
        if (keep) {
            memcpy(keep + h * X, k, D * sizeof(float));
            memcpy(keep + h * X + D, v, E * sizeof(float));
            keep[h * X + D + E] = decay;
            keep[h * X + D + E + 1] = beta;
        }
        float scale = 1.0f / sqrtf(dot(o, o, E) + net->norm_eps);
        for (int64_t e = 0; e < E; e++) o[e] = o[e] * scale * net->norm[e] * silu(gate[h * E + e]);
    }
}

/* Everything between a DeltaNet layer's two projections, for all rows of a step. */
VECTORISED void headlong_delta_net(const DeltaNet *net, const void *projected, void *result, int wide,
                                   const int64_t *table, int64_t rows, int64_t num_tokens) {
    const int64_t D = net->key_dim, E = net->value_dim, X = D + E + 2, H = net->value_heads;
    const int64_t C = 2 * net->key_heads * D + H * E, past = net->kernel - 1;
    const int64_t width = C + H * E + 2 * H, S_size = H * D * E;
    float *lines = workspace((past + num_tokens + 1) * C + 2 * H * E + 2 * H + S_size);
    float *mixed = lines + (past + num_tokens) * C, *rest = mixed + C, *out = rest + H * E + 2 * H, *copy = out + H * E;
    int64_t token = 0;
    for (int64_t r = 0; r < rows; r++) {
        const int64_t *row = table + r * ROW_FIELDS;
        const int64_t query_len = row[QUERY_LEN], certain = query_len - row[NUM_DRAFTS];
        float *window = net->windows + row[SLOT] * net->window * C;
        float *S = net->memory + row[SLOT] * S_size;
        float *drafts = net->drafts + row[SLOT] * net->max_drafts * H * X;
        memcpy(lines, window + row[NUM_REPLAY] * C, past * C * sizeof(float));
        for (int64_t t = 0; t < query_len; t++)
            load(lines + (past + t) * C, projected, (token + t) * width, C, wide);
        for (int64_t j = 0; j < row[NUM_REPLAY]; j++)
            for (int64_t h = 0; h < H; h++) {
                const float *x = drafts + (j * H + h) * X;
                delta_update(S + h * D * E, x, x + D, x[D + E], x[D + E + 1], 0, out, D, E);
            }
        for (int64_t t = 0; t < query_len; t++) {
            for (int64_t c = 0; c < C; c++) mixed[c] = 0.0f;
            for (int64_t tap = 0; tap <= past; tap++) {
                const float *input = lines + (t + tap) * C, *weight = net->conv + tap * C;
                for (int64_t c = 0; c < C; c++) mixed[c] += input[c] * weight[c];
            }
            for (int64_t c = 0; c < C; c++) mixed[c] = silu(mixed[c]);
            load(rest, projected, (token + t) * width + C, H * E + 2 * H, wide);
            if (t == certain) {
                memcpy(copy, S, S_size * sizeof(float));
                S = copy;
            }
            float *keep = t < certain ? 0 : drafts + (t - certain) * H * X;
            delta_token(net, S, mixed, rest, rest + H * E, rest + H * E + H, keep, out);
            store(result, (token + t) * H * E, out, H * E, wide);
        }
        memcpy(window, lines + certain * C, (past + row[NUM_DRAFTS]) * C * sizeof(float));
        token += query_len;
    }
}

typedef struct {
    int64_t heads, kv_heads, head_dim, half, page_size, padded_dim, gated;
    const float *qk_norm; /* [heads + kv_heads, head_dim], or null: then queries are scaled by q_scale alone */
    float qk_eps, q_scale;
    void *keys, *values; /* [pages, kv_heads, page_size, padded_dim] */
    int wide_cache;
} Attention;

/* Reads a stored key or value vector in place when it is float, through `buffer` when it is not. */
INLINE const float *cached(const void *cache, int64_t at, int64_t count, int wide, float *buffer) {
    if (wide) return (const float *)cache + at;
    load(buffer, cache, at, count, 0);
    return buffer;
}

/* One key head and the `group` queries that share it, so that each key and value is read once. A constant D
 * unrolls the inner loops. */
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

/* A query or key as it enters the rotation: normed, or a query scaled and a key as it is. */
INLINE void attention_head(const Attention *net, const float *x, int64_t h, float *head) {
    const int64_t D = net->head_dim;
    if (net->qk_norm) {
        const float *weight = net->qk_norm + h * D;
        float scale = 1.0f / sqrtf(dot(x, x, D) + net->qk_eps);
        for (int64_t d = 0; d < D; d++) head[d] = x[d] * scale * weight[d];
    } else {
        float scale = h < net->heads ? net->q_scale : 1.0f;
        for (int64_t d = 0; d < D; d++) head[d] = x[d] * scale;
    }
}

/* Norms and rotates one token's queries and keys in place; writes its key and value into their page. */
INLINE void attention_token(const Attention *net, float *line, const float *values, const float *cos,
                            const float *sin, const int64_t *pages, int64_t position, float *head) {
    const int64_t D = net->head_dim, half = net->half, H = net->heads, KV = net->kv_heads;
    for (int64_t h = 0; h < H + KV; h++) {
        float *x = line + h * D;
        attention_head(net, x, h, head);
        for (int64_t d = 0; d < half; d++) {
            x[d] = head[d] * cos[d] + head[d + half] * sin[d];
            x[d + half] = head[d + half] * cos[d + half] + head[d] * sin[d + half];
        }
        for (int64_t d = 2 * half; d < D; d++) x[d] = head[d];
    }
    for (int64_t kv = 0; kv < KV; kv++) {
        int64_t place = (pages[position / net->page_size] * KV + kv) * net->page_size + position % net->page_size;
        store(net->keys, place * net->padded_dim, line + (H + kv) * D, D, net->wide_cache);
        store(net->values, place * net->padded_dim, values + kv * D, D, net->wide_cache);
    }
}

/* Everything between an attention layer's two projections. A line is queries, keys, gates if there are any, values.
   Without a place for the result, only keys and values are written. */
VECTORISED void headlong_attention(const Attention *net, const void *projected, void *result, int wide,
                                   const float *cos, const float *sin, const int64_t *table, int64_t rows,
                                   const int64_t *pages, int64_t pages_width, int64_t longest) {
    const int64_t D = net->head_dim, H = net->heads, KV = net->kv_heads, per_kv = H / KV;
    const int64_t qk = (H + KV) * D, gates = net->gated ? H * D : 0, width = qk + gates + KV * D;
    float *line = workspace(width + H * D + 2 * D + per_kv * longest);
    const float *gate = line + qk, *values = gate + gates;
    float *out = line + width, *head = out + H * D, *buffer = head + D, *scores = buffer + D;
    int64_t token = 0;
    for (int64_t r = 0; r < rows; r++) {
        const int64_t *row = table + r * ROW_FIELDS, *own = pages + r * pages_width;
        for (int64_t t = 0; t < row[QUERY_LEN]; t++, token++) {
            const int64_t position = row[START] + t;
            load(line, projected, token * width, width, wide);
            attention_token(net, line, values, cos + token * D, sin + token * D, own, position, head);
            if (!result) continue;
            for (int64_t kv = 0; kv < KV; kv++) {
                int64_t first = kv * per_kv * D;
                switch (D) {
#define ATTEND(DIM) attend(net, line + first, per_kv, own, kv, position + 1, scores, out + first, buffer, DIM)
                case 64: ATTEND(64); break;
                case 128: ATTEND(128); break;
                case 256: ATTEND(256); break;
                default: ATTEND(D);
                }
            }
            for (int64_t i = 0; i < gates; i++) out[i] *= sigmoid(gate[i]);
            store(result, token * H * D, out, H * D, wide);
        }
    }
}
