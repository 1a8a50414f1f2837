/* What lies between a layer's two projections, for all rows of a step. The mirrors of these structures are in
 * ops/delta_net/native.py, ops/gated_attention/native.py and ops/program.py. */
#ifndef HEADLONG_CORES_H
#define HEADLONG_CORES_H
#include <stdint.h>

/* One row of the table that says what a step feeds. */
enum { SLOT, START, QUERY_LEN, NUM_DRAFTS, NUM_REPLAY, ROW_FIELDS };

typedef struct {
    const int64_t *table, *pages; /* [rows, ROW_FIELDS], [rows, pages_width] */
    int64_t rows, pages_width, longest;
    const float *cos, *sin; /* [tokens, head_dim] */
    int64_t threads;
} Step;

typedef struct {
    int64_t key_heads, value_heads, key_dim, value_dim, kernel, window, max_drafts;
    int64_t tiled; /* value head h reads key head h % key_heads, not h / per_key */
    const float *conv, *rate, *dt_bias, *norm; /* [kernel, channels], [heads], [heads], [value_dim] */
    float qk_eps, norm_eps;
    float *memory;  /* [slots, heads, key_dim, value_dim] */
    float *drafts;  /* [slots, max_drafts, heads, key_dim + value_dim + 2] */
    float *windows; /* [slots, window, channels] */
} DeltaNet;

typedef struct {
    int64_t heads, kv_heads, head_dim, half, page_size, padded_dim, gated;
    const float *qk_norm; /* [heads + kv_heads, head_dim], or null: then queries are scaled by q_scale alone */
    float qk_eps, q_scale;
    void *keys, *values; /* [pages, kv_heads, page_size, padded_dim] */
    int wide_cache;      /* float, as against bfloat16 */
} Attention;

void headlong_delta_net(const DeltaNet *net, const float *projected, float *result, const Step *step);

/* Without a place for the result, only keys and values are written. */
void headlong_attention(const Attention *net, const float *projected, float *result, const Step *step);

/* Tokens of the rows before row `r`. */
static inline int64_t first_token(const Step *step, int64_t r) {
    int64_t token = 0;
    for (int64_t i = 0; i < r; i++) token += step->table[i * ROW_FIELDS + QUERY_LEN];
    return token;
}

#endif
