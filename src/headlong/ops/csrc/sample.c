/* Samples a token for each row of logits: temperature, top-k, top-p and min-p, as sampling/processors.py has them, then
 * a draw.
 *
 * A filter keeps the best tokens down to some logit. To find that without sorting a vocabulary, tokens are counted, and
 * their weights summed, in buckets by how far they are below the best; only the bucket that a filter ends in is sorted.
 */
#include <stdlib.h>

#include "arithmetic.h"
#include "threads.h"
#include "tokens.h"
#include "workspace.h"

enum { BLOCK = 256, BUCKETS = 2048, FINENESS = 32 /* buckets to a factor of e */ };
static const double MAX_BELOW = 700.0; /* logits further below the best make no difference */

typedef struct {
    double temperature, top_k, top_p, min_p; /* 0, 1 and 0 turn a filter off */
} Filters;

typedef struct {
    const float *logits;    /* [num_rows, size] */
    const Filters *filters; /* [num_rows] */
    const int64_t *keys;
    int64_t size, *tokens;
} Samples;

typedef struct {
    const float *logits;
    int64_t size;
    float max_logit;            /* the best logit */
    double inverse_temperature; /* 1 / temperature */
    int16_t *buckets;           /* [size]: the bucket of each token */
    int64_t counts[BUCKETS];
    double weights[BUCKETS]; /* the softmax weight of each bucket, up to a factor */
    int last;                /* the last bucket of which some tokens are left */
    int64_t in_last;         /* how many of that bucket's best tokens are left */
} Row;

typedef struct {
    float logit;
    int32_t token;
    double weight;
} Candidate;

typedef struct {
    float min_logit;  /* smaller logits are cut */
    int64_t num_ties; /* how many logits equal to it stay: the first ones */
} Cut;

/* e^-x for x in 0…FARTHEST: 2^-n e^r with |r| <= ln2 / 2, e^r by its series to the thirteenth power. All of it in
 * doubles, or the loop around it stays scalar: the exponent is what is left of 2^52 + 1023 - n without its upper bits.
 */
INLINE double exp_negative(double x) {
    const double n = floor(x * 1.4426950408889634 + 0.5), r = n * 0.6931471805599453 - x, shifted = 0x1p52 + 1023.0 - n;
    double y = 1.0 / 6227020800.0;
    y = y * r + 1.0 / 479001600.0;
    y = y * r + 1.0 / 39916800.0;
    y = y * r + 1.0 / 3628800.0;
    y = y * r + 1.0 / 362880.0;
    y = y * r + 1.0 / 40320.0;
    y = y * r + 1.0 / 5040.0;
    y = y * r + 1.0 / 720.0;
    y = y * r + 1.0 / 120.0;
    y = y * r + 1.0 / 24.0;
    y = y * r + 1.0 / 6.0;
    y = y * r + 0.5;
    y = y * r + 1.0;
    y = y * r + 1.0;
    uint64_t bits;
    memcpy(&bits, &shifted, 8);
    bits <<= 52;
    double scale;
    memcpy(&scale, &bits, 8);
    return y * scale;
}

INLINE int length_of(int64_t size, int64_t first) { return (int)(size - first < BLOCK ? size - first : BLOCK); }

INLINE double below(const Row *row, float logit) {
    const double far = ((double)row->max_logit - (double)logit) * row->inverse_temperature;
    return far < MAX_BELOW ? far : MAX_BELOW;
}

/* Puts every token into its bucket. This is done once, since two compiled copies of the arithmetic may round
 * differently. */
INLINE void fill_buckets(Row *row) {
    row->buckets = (int16_t *)workspace(BUCKETS_OF_TOKENS, (row->size + 1) / 2);
    for (int64_t i = 0; i < row->size; i++) {
        const double place = below(row, row->logits[i]) * FINENESS;
        row->buckets[i] = (int16_t)(place < BUCKETS - 1 ? (int32_t)place : BUCKETS - 1);
    }
    memset(row->counts, 0, sizeof row->counts);
    for (int64_t i = 0; i < row->size; i++) row->counts[row->buckets[i]]++;
    row->last = BUCKETS - 1;
    while (!row->counts[row->last]) row->last--;
    row->in_last = row->counts[row->last];
}

/* Adds up the weights of tokens that are not below `min_logit`, by bucket. */
INLINE void sum_weights(Row *row, float min_logit) {
    double weights[BLOCK];
    memset(row->weights, 0, sizeof row->weights);
    for (int64_t first = 0; first < row->size; first += BLOCK) {
        const int length = length_of(row->size, first);
        const float *logits = row->logits + first;
        const int16_t *buckets = row->buckets + first;
        int32_t any = 0;
        for (int i = 0; i < length; i++) any |= logits[i] >= min_logit;
        if (!any) continue;
        for (int i = 0; i < length; i++) weights[i] = exp_negative(below(row, logits[i]));
        for (int i = 0; i < length; i++) row->weights[buckets[i]] += logits[i] < min_logit ? 0.0 : weights[i];
    }
}

static int by_logit(const void *one, const void *other) {
    const Candidate *a = one, *b = other;
    if (a->logit != b->logit) return a->logit < b->logit ? 1 : -1;
    return a->token < b->token ? -1 : 1;
}

/* The tokens of a bucket, best first; of equal ones the first. */
INLINE Candidate *sorted_bucket(const Row *row, int bucket) {
    Candidate *candidates = (Candidate *)workspace(CANDIDATES, 4 * row->counts[bucket]);
    int64_t number = 0;
    for (int64_t first = 0; first < row->size; first += BLOCK) {
        const int length = length_of(row->size, first);
        const int16_t *buckets = row->buckets + first;
        int32_t any = 0;
        for (int i = 0; i < length; i++) any |= buckets[i] == bucket;
        for (int i = 0; any && i < length; i++) {
            const float logit = row->logits[first + i];
            if (buckets[i] == bucket)
                candidates[number++] = (Candidate){logit, (int32_t)(first + i), exp_negative(below(row, logit))};
        }
    }
    qsort(candidates, (size_t)number, sizeof *candidates, by_logit);
    return candidates;
}

/* Where the k best end, all that are equal to the last of them among them. What lies below no longer counts. */
INLINE Cut cut_top_k(Row *row, int64_t k) {
    int64_t before = 0;
    row->last = 0;
    while (before + row->counts[row->last] < k) before += row->counts[row->last++];
    const Candidate *candidates = sorted_bucket(row, row->last);
    const Cut cut = {candidates[k - before - 1].logit, INT64_MAX};
    row->in_last = k - before;
    while (row->in_last < row->counts[row->last] && candidates[row->in_last].logit == cut.min_logit) row->in_last++;
    return cut;
}

/* The cut that keeps the best tokens which together hold a share of all weight, at least one; `cut` is what was cut
 * before. */
INLINE Cut cut_top_p(Row *row, double parallel_for, Cut cut) {
    double all = 0.0, before = 0.0;
    sum_weights(row, cut.min_logit);
    for (int i = 0; i <= row->last; i++) all += row->weights[i];
    const double wanted = parallel_for * all;
    int bucket = 0;
    while (bucket < row->last && before + row->weights[bucket] < wanted) before += row->weights[bucket++];
    const Candidate *candidates = sorted_bucket(row, bucket);
    const int64_t most = bucket == row->last ? row->in_last : row->counts[bucket];
    int64_t kept = 0;
    while (kept < most && (before < wanted || (bucket == 0 && kept == 0))) before += candidates[kept++].weight;
    if (bucket == row->last && kept == most) return cut;
    Cut own_cut = {candidates[kept - 1].logit, 0};
    for (int64_t i = kept; i > 0 && candidates[i - 1].logit == own_cut.min_logit; i--) own_cut.num_ties++;
    return own_cut;
}

/* Writes the scores of tokens that stay, and -inf for the others. */
INLINE void write_scores(const Row *row, double temperature, Cut cut, double floor, double *scores) {
    for (int64_t i = 0; i < row->size; i++) {
        const double score = (double)row->logits[i] / temperature;
        scores[i] = row->logits[i] < cut.min_logit || score < floor ? -INFINITY : score;
    }
    if (cut.num_ties == INT64_MAX) return;
    for (int64_t i = 0; i < row->size; i++)
        if (row->logits[i] == cut.min_logit && cut.num_ties-- <= 0) scores[i] = -INFINITY;
}

VECTORISED static void sample_lines(const void *arg, int64_t first, int64_t last) {
    const Samples *s = arg;
    static _Thread_local Row row;
    for (int64_t line = first; line < last; line++) {
        const Filters *f = s->filters + line;
        row.logits = s->logits + line * s->size;
        row.size = s->size;
        headlong_argmax(row.logits, 1, s->size, s->tokens + line, 1);
        row.max_logit = row.logits[s->tokens[line]];
        if (!(row.max_logit > -INFINITY && row.max_logit < INFINITY))
            continue; /* logits that are not finite have no weights */
        row.inverse_temperature = 1.0 / f->temperature;
        Cut cut = {-INFINITY, INT64_MAX};
        const int has_top_k = f->top_k > 0.0 && f->top_k < (double)s->size, has_top_p = f->top_p < 1.0;
        if (has_top_k || has_top_p) fill_buckets(&row);
        if (has_top_k) cut = cut_top_k(&row, (int64_t)f->top_k);
        if (has_top_p) cut = cut_top_p(&row, f->top_p, cut);
        double *scores = (double *)workspace(SCORES, 2 * s->size);
        const double floor = f->min_p > 0.0 ? (double)row.max_logit / f->temperature + log(f->min_p) : -INFINITY;
        write_scores(&row, f->temperature, cut, floor, scores);
        headlong_draw(scores, s->keys + line * 4, 1, s->size, s->tokens + line, 1);
    }
}

void headlong_sample(const float *logits, const Filters *filters, const int64_t *keys, int64_t num_rows, int64_t size,
                     int64_t *tokens, int num_threads) {
    Samples samples = {logits, filters, keys, size, tokens};
    parallel_for(sample_lines, &samples, num_rows, 1, num_threads);
}
