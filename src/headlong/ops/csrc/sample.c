/* A token for each row of logits: temperature, top-k, top-p and min-p, as sampling/processors.py has them, then a draw.
 *
 * A filter keeps the best tokens down to some logit. To find that without sorting a vocabulary, tokens are counted, and
 * their weights summed, in buckets by how far they are below the best; only the bucket that a filter ends in is sorted. */
#include <stdlib.h>

#include "arithmetic.h"
#include "threads.h"
#include "tokens.h"
#include "workspace.h"

enum { BLOCK = 256, BUCKETS = 2048, FINENESS = 32 /* buckets to a factor of e */ };
static const double FARTHEST = 700.0; /* below the best, that makes a difference */

typedef struct {
    double temperature, top_k, top_p, min_p; /* 0, 1 and 0: no such filter */
} Filters;

typedef struct {
    const float *logits;    /* [rows, size] */
    const Filters *filters; /* [rows] */
    const int64_t *keys;
    int64_t size, *tokens;
} Samples;

typedef struct {
    const float *logits;
    int64_t size;
    float top;               /* the best logit */
    double cold;             /* one by the temperature */
    int16_t *buckets;        /* of all tokens */
    int64_t counts[BUCKETS];
    double weights[BUCKETS]; /* of softmax, up to a factor */
    int last;                /* bucket of which something is left, */
    int64_t in_last;         /* so many of its best */
} Row;

typedef struct {
    float logit;
    int32_t token;
    double weight;
} Candidate;

typedef struct {
    float least;    /* what is below it is cut */
    int64_t equals; /* how many of those equal to it stay, the first ones */
} Cut;

/* e^-x for x in 0…FARTHEST: 2^-n e^r with |r| <= ln2 / 2, e^r by its series to the thirteenth power. All of it in
 * doubles, or the loop around it stays scalar: the exponent is what is left of 2^52 + 1023 - n without its upper bits. */
INLINE double vanishing(double x) {
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
    const double far = ((double)row->top - (double)logit) * row->cold;
    return far < FARTHEST ? far : FARTHEST;
}

/* Puts every token into its bucket, once: compiled twice, the same arithmetic may round otherwise. */
INLINE void count(Row *row) {
    row->buckets = (int16_t *)workspace(PLACES, (row->size + 1) / 2);
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

/* Those that are not below `least`. */
INLINE void weigh(Row *row, float least) {
    double weights[BLOCK];
    memset(row->weights, 0, sizeof row->weights);
    for (int64_t first = 0; first < row->size; first += BLOCK) {
        const int length = length_of(row->size, first);
        const float *logits = row->logits + first;
        const int16_t *buckets = row->buckets + first;
        int32_t any = 0;
        for (int i = 0; i < length; i++) any |= logits[i] >= least;
        if (!any) continue;
        for (int i = 0; i < length; i++) weights[i] = vanishing(below(row, logits[i]));
        for (int i = 0; i < length; i++) row->weights[buckets[i]] += logits[i] < least ? 0.0 : weights[i];
    }
}

static int by_logit(const void *one, const void *other) {
    const Candidate *a = one, *b = other;
    if (a->logit != b->logit) return a->logit < b->logit ? 1 : -1;
    return a->token < b->token ? -1 : 1;
}

/* The tokens of a bucket, best first; of equal ones the first. */
INLINE Candidate *sorted_bucket(const Row *row, int bucket) {
    Candidate *found = (Candidate *)workspace(CANDIDATES, 4 * row->counts[bucket]);
    int64_t number = 0;
    for (int64_t first = 0; first < row->size; first += BLOCK) {
        const int length = length_of(row->size, first);
        const int16_t *buckets = row->buckets + first;
        int32_t any = 0;
        for (int i = 0; i < length; i++) any |= buckets[i] == bucket;
        for (int i = 0; any && i < length; i++) {
            const float logit = row->logits[first + i];
            if (buckets[i] == bucket)
                found[number++] = (Candidate){logit, (int32_t)(first + i), vanishing(below(row, logit))};
        }
    }
    qsort(found, (size_t)number, sizeof *found, by_logit);
    return found;
}

/* Where the k best end, all that are equal to the last of them among them. What lies below no longer counts. */
INLINE Cut cut_top_k(Row *row, int64_t k) {
    int64_t before = 0;
    row->last = 0;
    while (before + row->counts[row->last] < k) before += row->counts[row->last++];
    const Candidate *found = sorted_bucket(row, row->last);
    const Cut cut = {found[k - before - 1].logit, INT64_MAX};
    row->in_last = k - before;
    while (row->in_last < row->counts[row->last] && found[row->in_last].logit == cut.least) row->in_last++;
    return cut;
}

/* Where those end that together hold a share of all weight, the best one in any case; `cut` is what was cut before. */
INLINE Cut cut_top_p(Row *row, double share, Cut cut) {
    double all = 0.0, before = 0.0;
    weigh(row, cut.least);
    for (int i = 0; i <= row->last; i++) all += row->weights[i];
    const double wanted = share * all;
    int bucket = 0;
    while (bucket < row->last && before + row->weights[bucket] < wanted) before += row->weights[bucket++];
    const Candidate *found = sorted_bucket(row, bucket);
    const int64_t most = bucket == row->last ? row->in_last : row->counts[bucket];
    int64_t kept = 0;
    while (kept < most && (before < wanted || (bucket == 0 && kept == 0))) before += found[kept++].weight;
    if (bucket == row->last && kept == most) return cut;
    Cut mine = {found[kept - 1].logit, 0};
    for (int64_t i = kept; i > 0 && found[i - 1].logit == mine.least; i--) mine.equals++;
    return mine;
}

/* Scores of what stays, -inf for the rest. */
INLINE void write_scores(const Row *row, double temperature, Cut cut, double floor, double *scores) {
    for (int64_t i = 0; i < row->size; i++) {
        const double score = (double)row->logits[i] / temperature;
        scores[i] = row->logits[i] < cut.least || score < floor ? -INFINITY : score;
    }
    if (cut.equals == INT64_MAX) return;
    for (int64_t i = 0; i < row->size; i++)
        if (row->logits[i] == cut.least && cut.equals-- <= 0) scores[i] = -INFINITY;
}

VECTORISED static void sample_lines(const void *given, int64_t first, int64_t last) {
    const Samples *s = given;
    static _Thread_local Row row;
    for (int64_t line = first; line < last; line++) {
        const Filters *f = s->filters + line;
        row.logits = s->logits + line * s->size;
        row.size = s->size;
        headlong_best(row.logits, 1, s->size, s->tokens + line, 1);
        row.top = row.logits[s->tokens[line]];
        if (!(row.top > -INFINITY && row.top < INFINITY)) continue; /* nothing to weigh */
        row.cold = 1.0 / f->temperature;
        Cut cut = {-INFINITY, INT64_MAX};
        const int few = f->top_k > 0.0 && f->top_k < (double)s->size, weighing = f->top_p < 1.0;
        if (few || weighing) count(&row);
        if (few) cut = cut_top_k(&row, (int64_t)f->top_k);
        if (weighing) cut = cut_top_p(&row, f->top_p, cut);
        double *scores = (double *)workspace(SCORES, 2 * s->size);
        const double floor = f->min_p > 0.0 ? (double)row.top / f->temperature + log(f->min_p) : -INFINITY;
        write_scores(&row, f->temperature, cut, floor, scores);
        headlong_draw(scores, s->keys + line * 4, 1, s->size, s->tokens + line, 1);
    }
}

void headlong_sample(const float *logits, const Filters *filters, const int64_t *keys, int64_t rows, int64_t size,
                     int64_t *tokens, int threads) {
    Samples samples = {logits, filters, keys, size, tokens};
    share(sample_lines, &samples, rows, 1, threads);
}
