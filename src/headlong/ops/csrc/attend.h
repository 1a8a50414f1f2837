/* Softmax attention of some queries over the pages of one row; every query is computed in one order, whatever others
 * there are.
 *
 * Legend. D numbers of a key, V numbers of a value. */
#ifndef HEADLONG_ATTEND_H
#define HEADLONG_ATTEND_H
#include "arithmetic.h"

/* The keys and values of one key head: position p of page g is at first + g page_stride + p width. */
typedef struct {
    const void *keys, *values;
    int64_t first, page_stride, page_size, width;
    int is_float; /* whether they are float or bfloat16 */
} Pages;

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

/* The `num_queries` queries that share one key head, so that each key and value is read once, over the positions from
 * `begin` up to `end`. `sinks`, where there are any, are one more score of each query, of a key that has no value.
 * Constants D and V let the compiler unroll the inner loops. */
INLINE void attend_from(const Pages *c, const float *q, int64_t num_queries, const int64_t *pages, int64_t begin,
                        int64_t end, const float *sinks, float *scores, float *out, float *scratch, const int64_t D,
                        const int64_t V) {
    const int64_t width = c->width, page_size = c->page_size, length = end - begin, first_page = begin / page_size;
    for (int64_t page = first_page, first = page * page_size; first < end; first += page_size, page++) {
        const int64_t at = pages[page] * c->page_stride + c->first, before = first - begin;
        const int64_t count = end - first < page_size ? end - first : page_size;
        for (int64_t p = before < 0 ? -before : 0; p < count; p++) {
            const float *k = load_vector(c->keys, at + p * width, D, c->is_float, scratch);
            for (int64_t g = 0; g < num_queries; g++) scores[g * length + before + p] = dot(q + g * D, k, D);
        }
    }
    for (int64_t g = 0; g < num_queries; g++) {
        float *own = scores + g * length, max_score = -INFINITY, total = 0.0f;
        for (int64_t p = 0; p < length; p++) max_score = own[p] > max_score ? own[p] : max_score;
        if (sinks && sinks[g] > max_score) max_score = sinks[g];
        for (int64_t p = 0; p < length; p++) own[p] = exponential(own[p] - max_score);
        for (int64_t p = 0; p < length; p++) total += own[p];
        if (sinks) total += exponential(sinks[g] - max_score);
        for (int64_t p = 0; p < length; p++) own[p] /= total;
    }
    for (int64_t i = 0; i < num_queries * V; i++) out[i] = 0.0f;
    for (int64_t page = first_page, first = page * page_size; first < end; first += page_size, page++) {
        const int64_t at = pages[page] * c->page_stride + c->first, before = first - begin;
        const int64_t count = end - first < page_size ? end - first : page_size;
        for (int64_t p = before < 0 ? -before : 0; p < count; p++) {
            const float *v = load_vector(c->values, at + p * width, V, c->is_float, scratch);
            for (int64_t g = 0; g < num_queries; g++) {
                float weight = scores[g * length + before + p], *own = out + g * V;
                for (int64_t d = 0; d < V; d++) own[d] += weight * v[d];
            }
        }
    }
}

/* Over all positions up to `length`. */
INLINE void attend(const Pages *c, const float *q, int64_t num_queries, const int64_t *pages, int64_t length,
                   float *scores, float *out, float *scratch, const int64_t D, const int64_t V) {
    attend_from(c, q, num_queries, pages, 0, length, 0, scores, out, scratch, D, V);
}

#endif
