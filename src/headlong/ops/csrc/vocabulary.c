/* Embedding and argmax: tokens to rows of the embedding, which may be laid out as a GEMM's weight, and logits to the
 * best token. */
#include "arithmetic.h"
#include "matmul.h"
#include "threads.h"
#include "tokens.h"

enum { TOKENS_PER_THREAD = 8 /* fewer tokens are not worth a thread */ };

INLINE float from_f16(uint16_t h) {
    uint32_t rest = (uint32_t)(h & 0x7FFF) << 13, bits;
    float x;
    memcpy(&x, &rest, 4);
    x *= 0x1p112f; /* corrects the exponent's bias, for subnormal numbers too */
    memcpy(&bits, &x, 4);
    if ((h & 0x7C00) == 0x7C00) bits |= 0x7F800000; /* infinity or NaN */
    bits |= (uint32_t)(h & 0x8000) << 16;
    memcpy(&x, &bits, 4);
    return x;
}

INLINE float from_e4m3(uint8_t code) {
    const int size = code & 0x7F;
    const float magnitude = size < 8 ? (float)size * 0x1p-9f : (float)(8 + size % 8) * ldexpf(1.0f, size / 8 - 10);
    return code & 0x80 ? -magnitude : magnitude;
}

/* The upper half of a float16. */
INLINE float from_e5m2(uint8_t code) { return from_f16((uint16_t)(code << 8)); }

static float factor(const Matrix *w, const uint8_t *factors, const uint8_t *shared_factors, int64_t block,
                    int64_t group_index, int64_t lane) {
    const int64_t groups = w->num_ins / w->group, at = (block * groups + group_index) * WIDTH + lane;
    if (w->factors == FLOAT) return ((const float *)factors)[at];
    if (w->factors == HALF) return from_f16(((const uint16_t *)factors)[at]);
    const int64_t whole = (block * (groups / w->span) + group_index / w->span) * WIDTH + lane;
    return from_f16(((const uint16_t *)shared_factors)[whole]) * (float)((const int8_t *)factors)[at];
}

static float code_at(const Matrix *w, int64_t block, int64_t lane, int64_t k) {
    const CodePosition at = code_position(w->type, w->group, k / w->group, k % w->group);
    const int byte = w->codes[((block * units_per_output(w) + at.unit) * WIDTH + lane) * UNIT + at.shift / 8];
    if (w->type == E4M3) return from_e4m3((uint8_t)byte);
    if (w->type == E5M2) return from_e5m2((uint8_t)byte);
    const int nibble = byte >> at.shift % 8 & 15;
    if (w->type == U4_TABLE) return w->table[nibble];
    return (float)(w->type < U4 ? byte - 128 : nibble);
}

/* Weight k of an output, which is lane `lane` of a block. */
INLINE float weight_at(const Matrix *w, int64_t block, int64_t lane, int64_t k) {
    const int64_t at = (block * w->num_ins + k) * WIDTH + lane;
    const uint16_t *halves = (const uint16_t *)w->codes;
    switch (w->type) {
    case F32: return ((const float *)w->codes)[at];
    case F16: return from_f16(halves[at]);
    case BF16:
    case BF16_ROUNDED: return from_bf16(halves[2 * ((block * (w->num_ins / 2) + k / 2) * WIDTH + lane) + k % 2]);
    }
    const float scale = factor(w, w->scales, w->scale_factors, block, k / w->group, lane);
    float weight = code_at(w, block, lane, k) * scale;
    if (w->type == U4) weight -= 8.0f * scale;
    if (w->offsets) weight += factor(w, w->offsets, w->offset_factors, block, k / w->group, lane);
    return weight;
}

/* Unpacks row `token` of the weight. */
static void weight_row(const Matrix *w, int64_t token, float *out) {
    for (int64_t k = 0; k < w->num_ins; k++) {
        const float weight = weight_at(w, token / WIDTH, token % WIDTH, k);
        if (!w->columns)
            out[k] = weight;
        else if (w->columns[k] >= 0)
            out[w->columns[k]] = w->column_factors ? weight * w->column_factors[k] : weight;
    }
}

typedef struct {
    const Matrix *w;
    const int64_t *tokens;
    float *out;
} Lookup;

/* Looks up embeddings. A token that does not exist gives NaN, which ends its own row and no other. */
static void look_up(const void *arg, int64_t first, int64_t last) {
    const Lookup *job = arg;
    for (int64_t i = first; i < last; i++) {
        float *own = job->out + i * job->w->row_size;
        if (job->tokens[i] >= 0 && job->tokens[i] < job->w->num_outs)
            weight_row(job->w, job->tokens[i], own);
        else
            for (int64_t k = 0; k < job->w->row_size; k++) own[k] = NAN;
    }
}

void headlong_embed(const Matrix *w, const int64_t *tokens, int64_t count, float *out, int num_threads) {
    Lookup job = {w, tokens, out};
    parallel_for(look_up, &job, count, TOKENS_PER_THREAD, num_threads);
}

typedef struct {
    const float *logits;
    int64_t size, *tokens;
} Lines;

enum { LANES = 64 };

/* Whether x is the argmax: a NaN if there is one, else the largest. */
INLINE int is_argmax(float x, float top, int has_nan) { return has_nan ? x != x : x == top; }

/* The index of the largest logit, of equal ones the first; NaN counts as largest. Explicit lanes, or the loops stay
 * scalar. */
INLINE int64_t argmax_of(const float *x, int64_t size) {
    float tops[LANES], top = -INFINITY;
    int32_t nans[LANES], has_nan = 0;
    for (int j = 0; j < LANES; j++) {
        tops[j] = -INFINITY;
        nans[j] = 0;
    }
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        for (int j = 0; j < LANES; j++) {
            tops[j] = x[i + j] > tops[j] ? x[i + j] : tops[j];
            nans[j] |= x[i + j] != x[i + j];
        }
    for (; i < size; i++) {
        top = x[i] > top ? x[i] : top;
        has_nan |= x[i] != x[i];
    }
    for (int j = 0; j < LANES; j++) {
        top = tops[j] > top ? tops[j] : top;
        has_nan |= nans[j];
    }
    for (i = 0; i + LANES <= size; i += LANES) {
        int32_t here = 0;
        for (int j = 0; j < LANES; j++) here |= is_argmax(x[i + j], top, has_nan);
        if (here) break;
    }
    while (i < size - 1 && !is_argmax(x[i], top, has_nan)) i++;
    return i;
}

VECTORISED static void argmax_of_lines(const void *arg, int64_t first, int64_t last) {
    const Lines *l = arg;
    for (int64_t row = first; row < last; row++) l->tokens[row] = argmax_of(l->logits + row * l->size, l->size);
}

void headlong_argmax(const float *logits, int64_t num_rows, int64_t size, int64_t *tokens, int num_threads) {
    Lines lines = {logits, size, tokens};
    parallel_for(argmax_of_lines, &lines, num_rows, 4, num_threads);
}
