/* Both ends of a model: tokens to rows of the embedding, which may be laid out as a product's weight, and logits to the
 * best token. */
#include "arithmetic.h"
#include "matmul.h"
#include "threads.h"
#include "tokens.h"

enum { TOKENS_EACH = 8 /* of the embedding, that are worth a thread */ };

INLINE float from_f16(uint16_t h) {
    uint32_t rest = (uint32_t)(h & 0x7FFF) << 13, bits;
    float x;
    memcpy(&x, &rest, 4);
    x *= 0x1p112f; /* the exponent's bias made right, for small numbers too */
    memcpy(&bits, &x, 4);
    if ((h & 0x7C00) == 0x7C00) bits |= 0x7F800000; /* infinity, or no number */
    bits |= (uint32_t)(h & 0x8000) << 16;
    memcpy(&x, &bits, 4);
    return x;
}

static float factor(const Matrix *w, const uint8_t *from, const uint8_t *wholes, int64_t block, int64_t number,
                    int64_t lane) {
    const int64_t groups = w->size / w->group, at = (block * groups + number) * WIDTH + lane;
    if (w->factors == FLOAT) return ((const float *)from)[at];
    if (w->factors == HALF) return from_f16(((const uint16_t *)from)[at]);
    const int64_t whole = (block * (groups / w->span) + number / w->span) * WIDTH + lane;
    return from_f16(((const uint16_t *)wholes)[whole]) * (float)((const int8_t *)from)[at];
}

static float code_at(const Matrix *w, int64_t block, int64_t lane, int64_t k) {
    const Place at = place_of(w->type, w->group, k / w->group, k % w->group);
    const int byte = w->codes[((block * units_of(w) + at.unit) * WIDTH + lane) * UNIT + at.shift / 8];
    return (float)(w->type < U4 ? byte - 128 : byte >> at.shift % 8 & 15);
}

/* Row `token` of the weight: what is multiplied for output `token`. */
static void weight_row(const Matrix *w, int64_t token, float *out) {
    const int64_t block = token / WIDTH, lane = token % WIDTH, single = block * w->size * WIDTH + lane;
    const uint16_t *halves = (const uint16_t *)w->codes;
    for (int64_t k = 0; k < w->size; k++) switch (w->type) {
        case F32: out[k] = ((const float *)w->codes)[single + k * WIDTH]; break;
        case F16: out[k] = from_f16(halves[single + k * WIDTH]); break;
        case BF16:
        case BF16_ROUNDED: out[k] = from_bf16(halves[2 * ((block * (w->size / 2) + k / 2) * WIDTH + lane) + k % 2]); break;
        default: {
            const float scale = factor(w, w->scales, w->scale_wholes, block, k / w->group, lane);
            out[k] = code_at(w, block, lane, k) * scale;
            if (w->type == U4) out[k] -= 8.0f * scale;
            if (w->offsets) out[k] += factor(w, w->offsets, w->offset_wholes, block, k / w->group, lane);
        }
        }
}

typedef struct {
    const Matrix *w;
    const int64_t *tokens;
    float *out;
} Lookup;

/* A token that does not exist is no number, which ends its row and nobody else's. */
static void look_up(const void *given, int64_t first, int64_t last) {
    const Lookup *job = given;
    for (int64_t i = first; i < last; i++) {
        float *own = job->out + i * job->w->size;
        if (job->tokens[i] >= 0 && job->tokens[i] < job->w->outs)
            weight_row(job->w, job->tokens[i], own);
        else
            for (int64_t k = 0; k < job->w->size; k++) own[k] = NAN;
    }
}

void headlong_embed(const Matrix *w, const int64_t *tokens, int64_t count, float *out, int threads) {
    Lookup job = {w, tokens, out};
    share(look_up, &job, count, TOKENS_EACH, threads);
}

typedef struct {
    const float *logits;
    int64_t size, *tokens;
} Lines;

enum { LANES = 64 };

/* Whether token `i` is what is looked for: no number if any is none, else the largest. */
INLINE int is_best(float x, float top, int strange) { return strange ? x != x : x == top; }

/* The first of the largest; what is no number is larger than all. Lanes of their own, or the loops stay scalar. */
INLINE int64_t best_of(const float *x, int64_t size) {
    float tops[LANES], top = -INFINITY;
    int32_t odd[LANES], strange = 0;
    for (int j = 0; j < LANES; j++) {
        tops[j] = -INFINITY;
        odd[j] = 0;
    }
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        for (int j = 0; j < LANES; j++) {
            tops[j] = x[i + j] > tops[j] ? x[i + j] : tops[j];
            odd[j] |= x[i + j] != x[i + j];
        }
    for (; i < size; i++) {
        top = x[i] > top ? x[i] : top;
        strange |= x[i] != x[i];
    }
    for (int j = 0; j < LANES; j++) {
        top = tops[j] > top ? tops[j] : top;
        strange |= odd[j];
    }
    for (i = 0; i + LANES <= size; i += LANES) {
        int32_t here = 0;
        for (int j = 0; j < LANES; j++) here |= is_best(x[i + j], top, strange);
        if (here) break;
    }
    while (i < size - 1 && !is_best(x[i], top, strange)) i++;
    return i;
}

VECTORISED static void best_of_lines(const void *given, int64_t first, int64_t last) {
    const Lines *l = given;
    for (int64_t row = first; row < last; row++) l->tokens[row] = best_of(l->logits + row * l->size, l->size);
}

void headlong_best(const float *logits, int64_t rows, int64_t size, int64_t *tokens, int threads) {
    Lines lines = {logits, size, tokens};
    share(best_of_lines, &lines, rows, 4, threads);
}
