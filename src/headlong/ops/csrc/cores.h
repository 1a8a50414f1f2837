/* The cores of DeltaNet and attention layers: what lies between a layer's two projections, for all rows of a step.
 * ops/delta_net/native.py, ops/gated_attention/native.py, ops/latent_attention/native.py and ops/native_step.py mirror
 * these structures. */
#ifndef HEADLONG_CORES_H
#define HEADLONG_CORES_H
#include <stdint.h>

#include "matmul.h"

/* Columns of a step's table of rows: the state slot, the position of the first token, the tokens (drafts are the last
 * ones), and how many drafts of the step before are to be replayed. */
enum { SLOT, START, QUERY_LEN, NUM_DRAFTS, NUM_REPLAY, ROW_FIELDS };

typedef struct {
    const int64_t *table, *pages; /* [num_rows, ROW_FIELDS], [num_rows, stride_pages] */
    int64_t num_rows, stride_pages, max_length;
    const float *cos, *sin; /* [num_tokens, head_dim] */
    int64_t num_threads;
} Step;

typedef struct {
    int64_t num_key_heads, num_value_heads, key_dim, value_dim, num_taps, window_size, max_drafts;
    int64_t tiled;                             /* value head h reads key head h % key_heads, not h / per_key */
    const float *conv, *rate, *dt_bias, *norm; /* [num_taps, channels], [heads], [heads], [value_dim] */
    float qk_eps, norm_eps;
    float *state;   /* [slots, heads, key_dim, value_dim] */
    float *drafts;  /* [slots, max_drafts, heads, key_dim + value_dim + 2] */
    float *windows; /* [slots, window_size, channels] */
} DeltaNet;

typedef struct {
    int64_t num_heads, num_kv_heads, head_dim, half_rotary_dim, page_size, padded_dim, gated;
    const float *qk_norm; /* [num_heads + num_kv_heads, head_dim]; if null, queries are scaled by q_scale alone */
    float qk_eps, q_scale;
    void *keys, *values; /* [pages, num_kv_heads, page_size, padded_dim] */
    int is_float;        /* whether the cache is float or bfloat16 */
    int64_t window;      /* the positions that a token attends to, its own the last of them; 0 for all */
    const float *sinks;  /* [num_heads], or null: scores that take part in the softmax and have no value */
} Attention;

typedef struct {
    int64_t num_heads, plain_dim, rope_dim, rank, value_dim, interleaved, page_size, padded_width;
    const float *norm; /* [rank] */
    float eps, scale;
    const Matrix *keys, *values; /* of each head: [rank, plain_dim] and [value_dim, rank] */
    void *latents;               /* [pages, page_size, padded_width] */
    int is_float;                /* whether the cache is float or bfloat16 */
} LatentAttention;

void headlong_delta_net(const DeltaNet *net, const float *projected, float *result, const Step *step);

/* With a null `result`, only keys and values are written. */
void headlong_attention(const Attention *net, const float *projected, float *result, const Step *step);

/* With a null `result`, only latents are written, and queries are not read. */
void headlong_latent_attention(const LatentAttention *net, const float *queries, const float *given, float *result,
                               const Step *step);

/* The index of the first token of row `r` among all tokens of the step. */
static inline int64_t first_token(const Step *step, int64_t r) {
    int64_t token = 0;
    for (int64_t i = 0; i < r; i++) token += step->table[i * ROW_FIELDS + QUERY_LEN];
    return token;
}

#endif
