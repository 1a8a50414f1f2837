/* The core of a latent attention layer in its absorbed form: queries are brought to the latents, the latents' weighted
 * sums to values (ops/latent_attention/reference.py derives it). Tiles of a row's tokens and groups of heads are shared
 * among threads; every head of a token is computed in one order, so its bits depend on its own past alone.
 *
 * Legend. H heads, P plain_dim, R rope_dim, W rank + rope_dim. Queries of a token are [H, P + R], its latents are [rank
 * + R], its result is [H, value_dim]. */
#include "arithmetic.h"
#include "attend.h"
#include "cores.h"
#include "threads.h"
#include "workspace.h"

enum {
    TOKENS = 32,     /* of a tile */
    MAX_GROUP = 16,  /* the most heads of a group */
    SHARED_ROWS = 8, /* fewer tokens are not worth a second thread, where nothing is multiplied */
};

typedef struct {
    const LatentAttention *net;
    const float *queries, *given;
    float *result;
    const Step *step;
    int64_t group; /* heads that share each reading of the latents */
} Call;

/* Rotates pairs, which are neighbours or in two halves, into two halves. */
INLINE void rotate(const LatentAttention *net, const float *x, const float *cos, const float *sin, float scale,
                   float *out) {
    const int64_t half = net->rope_dim / 2, next = net->interleaved ? 1 : half, step = net->interleaved ? 2 : 1;
    for (int64_t d = 0; d < half; d++) {
        const float first = x[d * step] * scale, second = x[d * step + next] * scale;
        out[d] = first * cos[d] + second * sin[d];
        out[d + half] = second * cos[d + half] + first * sin[d + half];
    }
}

INLINE int64_t row_of_token(const Step *step, int64_t token, int64_t *position) {
    int64_t r = 0;
    for (; token >= step->table[r * ROW_FIELDS + QUERY_LEN]; r++) token -= step->table[r * ROW_FIELDS + QUERY_LEN];
    *position = step->table[r * ROW_FIELDS + START] + token;
    return r;
}

VECTORISED static void write_latents(const void *arg, int64_t begin, int64_t end) {
    const Call *c = arg;
    const LatentAttention *net = c->net;
    const int64_t rank = net->rank, R = net->rope_dim, W = rank + R;
    float *vector = workspace(CORE, W);
    for (int64_t token = begin; token < end; token++) {
        int64_t position;
        const int64_t r = row_of_token(c->step, token, &position);
        const int64_t *pages = c->step->pages + r * c->step->stride_pages;
        const float *x = c->given + token * W, inverse = 1.0f / sqrtf(dot(x, x, rank) + net->eps);
        for (int64_t i = 0; i < rank; i++) vector[i] = x[i] * inverse * net->norm[i];
        rotate(net, x + rank, c->step->cos + token * R, c->step->sin + token * R, 1.0f, vector + rank);
        const int64_t place = pages[position / net->page_size] * net->page_size + position % net->page_size;
        store_vector(net->latents, place * net->padded_width, vector, W, net->is_float);
    }
}

/* Some tokens of one row, and some heads of theirs. */
INLINE void attend_tile(const Call *c, int64_t r, int64_t offset, int64_t num_tokens, int64_t first_head,
                        int64_t num_heads) {
    const LatentAttention *net = c->net;
    const int64_t H = net->num_heads, P = net->plain_dim, R = net->rope_dim, rank = net->rank, W = rank + R;
    const int64_t V = net->value_dim, first = first_token(c->step, r) + offset;
    const int64_t *pages = c->step->pages + r * c->step->stride_pages;
    const int64_t wider = P > rank ? P : rank, start = c->step->table[r * ROW_FIELDS + START] + offset;
    float *x = workspace(CORE, num_tokens * (wider + num_heads * (W + rank)) + W + num_heads * c->step->max_length);
    float *q = x + num_tokens * wider, *sums = q + num_tokens * num_heads * W;
    float *scratch = sums + num_tokens * num_heads * rank, *scores = scratch + W;
    for (int64_t h = 0; h < num_heads; h++) {
        for (int64_t t = 0; t < num_tokens; t++) {
            const int64_t token = first + t;
            const float *own = c->queries + (token * H + first_head + h) * (P + R);
            for (int64_t i = 0; i < P; i++) x[t * P + i] = own[i] * net->scale;
            rotate(net, own + P, c->step->cos + token * R, c->step->sin + token * R, net->scale,
                   q + (t * num_heads + h) * W + rank);
        }
        gemm(net->keys + first_head + h, x, num_tokens, q + h * W, num_heads * W, 0, 1);
    }
    const Pages cache = {net->latents, net->latents, 0, net->page_size * net->padded_width, net->page_size,
                         net->padded_width, net->is_float};
    for (int64_t t = 0; t < num_tokens; t++) {
        const float *own = q + t * num_heads * W;
        float *sum = sums + t * num_heads * rank;
        if (W == 576 && rank == 512) {
            attend(&cache, own, num_heads, pages, start + t + 1, scores, sum, scratch, 576, 512);
        } else {
            attend(&cache, own, num_heads, pages, start + t + 1, scores, sum, scratch, W, rank);
        }
    }
    for (int64_t h = 0; h < num_heads; h++) {
        for (int64_t t = 0; t < num_tokens; t++)
            memcpy(x + t * rank, sums + (t * num_heads + h) * rank, rank * sizeof *x);
        gemm(net->values + first_head + h, x, num_tokens, c->result + (first * H + first_head + h) * V, H * V, 0, 1);
    }
}

INLINE int64_t num_groups(const Call *c) { return (c->net->num_heads + c->group - 1) / c->group; }
INLINE int64_t tiles_of_row(const Step *step, int64_t r) {
    return (step->table[r * ROW_FIELDS + QUERY_LEN] + TOKENS - 1) / TOKENS;
}

VECTORISED static void attend_tiles(const void *arg, int64_t begin, int64_t end) {
    const Call *c = arg;
    for (int64_t i = begin; i < end; i++) {
        int64_t tile = i / num_groups(c), first_head = i % num_groups(c) * c->group, r = 0;
        for (; tile >= tiles_of_row(c->step, r); r++) tile -= tiles_of_row(c->step, r);
        const int64_t left = c->step->table[r * ROW_FIELDS + QUERY_LEN] - tile * TOKENS;
        const int64_t heads = c->net->num_heads - first_head;
        attend_tile(c, r, tile * TOKENS, left < TOKENS ? left : TOKENS, first_head, heads < c->group ? heads : c->group);
    }
}

void headlong_latent_attention(const LatentAttention *net, const float *queries, const float *given, float *result,
                               const Step *step) {
    const int64_t per_thread = (net->num_heads + step->num_threads - 1) / step->num_threads;
    Call call = {net, queries, given, result, step, per_thread < MAX_GROUP ? per_thread : MAX_GROUP};
    int64_t tiles = 0;
    for (int64_t r = 0; r < step->num_rows; r++) tiles += tiles_of_row(step, r);
    parallel_for(write_latents, &call, first_token(step, step->num_rows), SHARED_ROWS, (int)step->num_threads);
    if (result) parallel_for(attend_tiles, &call, tiles * num_groups(&call), 1, (int)step->num_threads);
}
