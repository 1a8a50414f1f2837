/* Calls every kernel of the library on numbers drawn from a fixed sequence and writes all results to standard output:
 * a line "name type count", then the bytes. Built for two machines, its results can be compared; what must be the same
 * bit for bit on one machine, whoever is computed beside and by how many threads, it compares itself. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cores.h"
#include "experts.h"
#include "tokens.h"

void headlong_matmul(const Matrix *w, const float *x, int64_t rows, float *y, int64_t stride, int threads);
void headlong_lay_out(const uint8_t *from, const int64_t *outs, int64_t rows, int64_t units, int64_t unit, uint8_t *to,
                      int threads);
void headlong_lay_out_blocks(const uint8_t *from, const int64_t *outs, int64_t rows, const Matrix *w, int threads);
void headlong_embed(const Matrix *w, const int64_t *tokens, int64_t count, float *out, int threads);
void headlong_sample(const float *logits, const double *filters, const int64_t *keys, int64_t rows, int64_t size,
                     int64_t *tokens, int threads);
void headlong_rms_norm(const float *x, const float *weight, float eps, float *out, int64_t rows, int64_t size,
                       int threads);
typedef struct {
    int64_t kind, from, to, beside, size, stride, column, add;
    const void *what;
    double eps;
} Instruction; /* as in program.c */
void headlong_run(const Instruction *program, int64_t count, float *const *buffers, int64_t tokens, const Step *step);

enum { THREADS = 3 };

static uint64_t state = 1;
static uint32_t drawn(void) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 33);
}
static float number(void) { return (float)((int32_t)drawn() - (1 << 30)) * 0x1p-30f; } /* in [-1, 1) */

static void *room(int64_t bytes) {
    void *found = calloc(1, (size_t)bytes + 64);
    if (!found) exit(2);
    return found;
}
static float *numbers(int64_t count) {
    float *x = room(4 * count);
    for (int64_t i = 0; i < count; i++) x[i] = number();
    return x;
}
static uint8_t *bytes(int64_t count) {
    uint8_t *x = room(count);
    for (int64_t i = 0; i < count; i++) x[i] = (uint8_t)drawn();
    return x;
}
/* Of moderate size: eight exponents from `least` on. */
static uint16_t *halves(int64_t count, int mantissa, int least) {
    uint16_t *x = room(2 * count);
    for (int64_t i = 0; i < count; i++) {
        const uint32_t bits = drawn();
        x[i] = (uint16_t)((bits & 0x8000) | ((unsigned)least + (bits >> 16) % 8) << mantissa | (bits & ((1u << mantissa) - 1)));
    }
    return x;
}

static void tell(const char *name, char type, const void *data, int64_t count) {
    printf("%s %c %lld\n", name, type, (long long)count);
    fwrite(data, type == 'f' ? 4 : type == 'q' ? 8 : 1, (size_t)count, stdout);
}
static void same(const char *name, const void *a, const void *b, int64_t count) {
    if (!memcmp(a, b, (size_t)count)) return;
    fprintf(stderr, "%s: bits depend on company or threads\n", name);
    exit(1);
}

static const char *TYPES[] = {"F32", "F16", "BF16", "BF16_ROUNDED", "I8", "I8_OFFSET",
                              "E4M3", "U4", "U4_OFFSET", "U4_TABLE"};
static const char *FACTORS[] = {"float", "half", "parts"};

static const uint8_t *factors(int kind, int64_t count) {
    if (kind == FLOAT) return (uint8_t *)numbers(count);
    return kind == HALF ? (uint8_t *)halves(count, 10, 8) : bytes(count);
}

static Matrix matrix(int type, int kind, int64_t size, int64_t outs) {
    const int64_t blocks = (outs + WIDTH - 1) / WIDTH, all = blocks * WIDTH * size;
    Matrix w = {type, size, outs, type < I8 ? size : 32, kind, kind == PARTS ? 4 : 1, 0, 0, 0, 0, 0, numbers(outs), 0};
    if (type == U4_TABLE) w.table = numbers(16);
    if (type == F32) w.codes = (uint8_t *)numbers(all);
    else if (type == F16) w.codes = (uint8_t *)halves(all, 10, 8);
    else if (type < I8) w.codes = (uint8_t *)halves(all, 7, 120);
    else w.codes = bytes(type < U4 ? all : all / 2);
    if (type < I8) return w;
    const int64_t groups = all / w.group;
    w.scales = factors(kind, groups);
    if (type == I8_OFFSET || type == U4_OFFSET) w.offsets = factors(kind, groups);
    if (kind == PARTS) {
        w.scale_factors = (uint8_t *)halves(groups / w.span, 10, 8);
        if (w.offsets) w.offset_factors = (uint8_t *)halves(groups / w.span, 10, 8);
    }
    return w;
}

static void products(void) {
    enum { ROWS = 13, SIZE = 640, OUTS = 200, TOKENS = 9 };
    const int64_t tokens[TOKENS] = {0, 1, 63, 64, 130, 199, 200, -1, 7};
    for (int type = 0; type < NUM_TYPES; type++)
        for (int kind = 0; kind < (type < I8 ? 1 : 3); kind++) {
            char name[64];
            state = (uint64_t)(type == BF16_ROUNDED ? BF16 : type) * 8 + (uint64_t)kind; /* rounded or not: the same */
            Matrix w = matrix(type, kind, SIZE, OUTS);
            float *x = numbers(ROWS * SIZE), *all = room(4 * ROWS * OUTS), *some = room(4 * ROWS * OUTS);
            headlong_matmul(&w, x, ROWS, all, OUTS, 1);
            snprintf(name, sizeof name, "matmul-%s-%s", TYPES[type], FACTORS[kind]);
            tell(name, 'f', all, ROWS * OUTS);
            headlong_matmul(&w, x, ROWS, some, OUTS, THREADS);
            same(name, all, some, 4 * ROWS * OUTS);
            for (int rows = 1; rows < ROWS; rows++) {
                headlong_matmul(&w, x + (ROWS - rows) * SIZE, rows, some, OUTS, 1);
                same(name, all + (ROWS - rows) * OUTS, some, 4 * rows * OUTS);
            }
            float *rows = room(4 * TOKENS * SIZE);
            headlong_embed(&w, tokens, TOKENS, rows, THREADS);
            snprintf(name, sizeof name, "embed-%s-%s", TYPES[type], FACTORS[kind]);
            tell(name, 'f', rows, TOKENS * SIZE);
        }
}

static void layouts(void) {
    enum { ROWS = 150, UNITS = 40, SIZE = 96 };
    int64_t outs[ROWS];
    /* The first half in order, the second in another. */
    for (int i = 0; i < ROWS; i++) outs[i] = i < ROWS / 2 ? i : ROWS / 2 + (i - ROWS / 2) * 7 % (ROWS - ROWS / 2);
    const int64_t blocks = (ROWS + WIDTH - 1) / WIDTH;
    for (int64_t unit = 1; unit <= 4; unit *= 2) {
        const int64_t total = blocks * WIDTH * UNITS * unit;
        uint8_t *to = room(total);
        headlong_lay_out(bytes(ROWS * UNITS * unit), outs, ROWS, UNITS, unit, to, THREADS);
        tell("lay_out", 'b', to, total);
    }
    for (int type = I8; type < NUM_TYPES; type++) {
        if (type == I8_OFFSET) continue;
        const int64_t groups = SIZE / 32, codes = blocks * WIDTH * (type == I8 ? SIZE : SIZE / 2);
        const int64_t factors = blocks * WIDTH * groups * 2, block = type == I8 ? 34 : type == U4 ? 18 : 20;
        uint8_t *all = room(codes + 2 * factors);
        Matrix w = {type, SIZE, ROWS, 32, HALF, 1, all, all + codes, all + codes + factors, 0, 0, 0};
        headlong_lay_out_blocks(bytes(ROWS * groups * block), outs, ROWS, &w, THREADS);
        tell("lay_out_blocks", 'b', all, codes + 2 * factors);
    }
}

static void small(void) {
    enum { ROWS = 37, SIZE = 1001, VOCABULARY = 5003 };
    float *x = numbers(ROWS * 2 * SIZE), *out = room(4 * ROWS * SIZE);
    for (int i = 0; i < ROWS * 2 * SIZE; i++) x[i] *= 8.0f;
    headlong_rms_norm(x, numbers(SIZE), 1e-3f, out, ROWS, SIZE, THREADS);
    tell("rms_norm", 'f', out, ROWS * SIZE);
    headlong_silu_mul(x, out, ROWS, SIZE, 0, THREADS);
    tell("silu_mul", 'f', out, ROWS * SIZE);
    const Activation clamped = {1.702f, 7.0f, 1.0f};
    headlong_silu_mul(x, out, ROWS, SIZE, &clamped, THREADS);
    tell("clamped", 'f', out, ROWS * SIZE);

    float *logits = numbers(ROWS * VOCABULARY);
    for (int row = 0; row < ROWS; row++) logits[row * VOCABULARY + drawn() % VOCABULARY] = 2.0f;
    logits[3 * VOCABULARY + 17] = logits[3 * VOCABULARY + 4999] = 3.0f; /* the first of two */
    logits[4 * VOCABULARY + 99] = NAN;
    for (int i = 0; i < VOCABULARY; i++) logits[5 * VOCABULARY + i] = -INFINITY;
    int64_t tokens[ROWS], keys[4 * ROWS];
    headlong_argmax(logits, ROWS, VOCABULARY, tokens, THREADS);
    tell("best", 'q', tokens, ROWS);
    double *scores = room(8 * ROWS * VOCABULARY);
    for (int i = 0; i < ROWS * VOCABULARY; i++) scores[i] = 9.0 * (double)logits[i];
    for (int i = 0; i < 4 * ROWS; i++) keys[i] = drawn() % (i % 4 ? 1000 : 1u << 30);
    headlong_draw(scores, keys, ROWS, VOCABULARY, tokens, THREADS);
    tell("draw", 'q', tokens, ROWS);
    static const double FILTERS[4][4] = {{0.1, 0, 1, 0}, {0.1, 20, 1, 0}, {0.1, 0, 0.9, 0}, {0.2, 50, 0.8, 0.01}};
    double filters[4 * ROWS];
    for (int i = 0; i < 4 * ROWS; i++) filters[i] = FILTERS[i / 4 % 4][i % 4];
    headlong_sample(logits, filters, keys, ROWS, VOCABULARY, tokens, THREADS);
    tell("sample", 'q', tokens, ROWS);
}

/* Three rows: one that begins, one with drafts, one that replays two. */
enum { ROWS = 3, TOKENS = 5 + 4 + 3, SLOTS = 4, PAGE = 16, PAGES = 3 };
static const int64_t TABLE[ROWS][ROW_FIELDS] = {{0, 0, 5, 0, 0}, {2, 17, 4, 3, 0}, {1, 30, 3, 1, 2}};
static const int64_t PAGE_TABLE[ROWS][PAGES] = {{3, 1, 0}, {5, 2, 0}, {4, 6, 7}};
enum { NUM_PAGES = 8 };

static Step step_over(const float *cos, const float *sin, int threads) {
    return (Step){TABLE[0], PAGE_TABLE[0], ROWS, PAGES, PAGE * PAGES, cos, sin, threads};
}

static void delta_nets(void) {
    enum { K = 2, H = 4, D = 32, E = 80, KERNEL = 4, DRAFTS = 3, WINDOW = KERNEL - 1 + DRAFTS, X = D + E + 2 };
    enum { C = 2 * K * D + H * E, IN = C + H * E + 2 * H };
    enum { MEMORY = SLOTS * H * D * E, KEPT = SLOTS * DRAFTS * H * X, WINDOWS = SLOTS * WINDOW * C };
    for (int64_t tiled = 0; tiled < 2; tiled++) {
        float *memory = numbers(MEMORY), *drafts = numbers(KEPT), *windows = numbers(WINDOWS);
        float *conv = numbers(KERNEL * C), *rate = numbers(H), *dt = numbers(H), *norm = numbers(E);
        float *x = numbers(TOKENS * IN), *results[2];
        for (int i = 0; i < H; i++) rate[i] = -1.0f - rate[i];
        float *states[2];
        for (int turn = 0; turn < 2; turn++) {
            float *all = states[turn] = room(4 * (MEMORY + KEPT + WINDOWS));
            memcpy(all, memory, 4 * MEMORY);
            memcpy(all + MEMORY, drafts, 4 * KEPT);
            memcpy(all + MEMORY + KEPT, windows, 4 * WINDOWS);
            DeltaNet net = {K, H, D, E, KERNEL, WINDOW, DRAFTS, tiled, conv, rate, dt, norm, 1e-6f, 1e-6f,
                            all, all + MEMORY, all + MEMORY + KEPT};
            Step step = step_over(0, 0, turn ? THREADS : 1);
            results[turn] = room(4 * TOKENS * H * E);
            headlong_delta_net(&net, x, results[turn], &step);
        }
        tell("delta_net", 'f', results[0], TOKENS * H * E);
        tell("delta_net-state", 'f', states[0], MEMORY + KEPT + WINDOWS);
        same("delta_net", results[0], results[1], 4 * TOKENS * H * E);
        same("delta_net-state", states[0], states[1], 4 * (MEMORY + KEPT + WINDOWS));
    }
}

static void attentions(void) {
    enum { H = 6, KV = 2 };
    for (int variant = 0; variant < 8; variant++) {
        const int64_t D = variant & 1 ? 64 : 40, gated = variant >> 1 & 1, wide = variant >> 2, half = D / 4;
        const int64_t width = (H + KV) * D + (gated ? H * D : 0) + KV * D, cache = NUM_PAGES * KV * PAGE * D;
        float *norm = gated ? numbers((H + KV) * D) : 0, *cos = numbers(TOKENS * D), *sin = numbers(TOKENS * D);
        float *x = numbers(TOKENS * width), *results[2];
        const void *filled = wide ? (void *)numbers(2 * cache) : (void *)halves(2 * cache, 7, 120);
        uint8_t *caches[2];
        const int64_t nbytes = cache * (wide ? 4 : 2);
        for (int turn = 0; turn < 2; turn++) {
            caches[turn] = room(2 * nbytes);
            memcpy(caches[turn], filled, (size_t)(2 * nbytes));
            Attention net = {H,     KV,    D,      half,         PAGE,                  D,        gated,
                             norm,  1e-6f, 0.125f, caches[turn], caches[turn] + nbytes, (int)wide};
            Step step = step_over(cos, sin, turn ? THREADS : 1);
            results[turn] = room(4 * TOKENS * H * D);
            headlong_attention(&net, x, results[turn], &step);
        }
        tell("attention", 'f', results[0], TOKENS * H * D);
        tell(wide ? "attention-cache-float" : "attention-cache-bf16", wide ? 'f' : 'h', caches[0],
             wide ? 2 * cache : 2 * nbytes);
        same("attention", results[0], results[1], 4 * TOKENS * H * D);
        same("attention-cache", caches[0], caches[1], 2 * nbytes);
    }
}

static void latents(void) {
    enum { H = 5, P = 24, R = 16, RANK = 40, V = 20, W = RANK + R, CACHE = NUM_PAGES * PAGE * W };
    for (int variant = 0; variant < 4; variant++) {
        const int interleaved = variant & 1, wide = variant >> 1;
        Matrix keys[H], values[H];
        for (int h = 0; h < H; h++) keys[h] = matrix(F32, FLOAT, P, RANK), values[h] = matrix(BF16, FLOAT, RANK, V);
        float *norm = numbers(RANK), *cos = numbers(TOKENS * R), *sin = numbers(TOKENS * R);
        float *queries = numbers(TOKENS * H * (P + R)), *given = numbers(TOKENS * W), *results[2];
        const void *filled = wide ? (void *)numbers(CACHE) : (void *)halves(CACHE, 7, 120);
        uint8_t *caches[2];
        for (int turn = 0; turn < 2; turn++) {
            caches[turn] = room(4 * CACHE);
            memcpy(caches[turn], filled, CACHE * (wide ? 4 : 2));
            LatentAttention net = {H,    P,     R,      RANK, V,      interleaved,  PAGE, W,
                                   norm, 1e-6f, 0.125f, keys, values, caches[turn], wide};
            Step step = step_over(cos, sin, turn ? THREADS : 1);
            results[turn] = room(4 * TOKENS * H * V);
            headlong_latent_attention(&net, queries, given, results[turn], &step);
        }
        tell("latents", 'f', results[0], TOKENS * H * V);
        tell(wide ? "latents-cache-float" : "latents-cache-bf16", wide ? 'f' : 'h', caches[0],
             wide ? CACHE : 2 * CACHE);
        same("latents", results[0], results[1], 4 * TOKENS * H * V);
        same("latents-cache", caches[0], caches[1], CACHE * (wide ? 4 : 2));
    }
}

static Linear linear(int type, int64_t size, int64_t outs) {
    Matrix *w = room(sizeof *w);
    Panel *panel = room(sizeof *panel);
    *w = matrix(type, HALF, size, outs);
    *panel = (Panel){w, 0};
    return (Linear){panel, 1, outs};
}

/* Of every type; as many tokens as are taken in two parts. */
static Experts all_experts(int64_t size) {
    enum { COUNT = NUM_TYPES, ACTIVE = 3, INNER = 96 };
    Expert *all = room((COUNT + 1) * sizeof *all);
    for (int e = 0; e <= COUNT; e++) {
        const int type = e % NUM_TYPES == BF16_ROUNDED ? F32 : e % NUM_TYPES;
        all[e] = (Expert){linear(type, size, 2 * INNER), linear(type, INNER, size)};
    }
    return (Experts){COUNT, ACTIVE, 1, size, all, 0, 1, 1, GATED, 0, 1.0f};
}

static void experts(void) {
    enum { SIZE = 128, MANY = 150, LOGITS = NUM_TYPES + 1 };
    Experts net = all_experts(SIZE);
    float *x = numbers(MANY * SIZE), *logits = numbers(MANY * LOGITS), *before = numbers(MANY * SIZE);
    float *all = room(4 * MANY * SIZE), *some = room(4 * MANY * SIZE);
    for (int way = 0; way < 4; way++) { /* softmax, then sigmoid of groups with a bias and a shared expert as it is */
        net.normalise = way % 2;
        if (way == 2) {
            net.sigmoid_scores = 1, net.num_groups = NUM_TYPES / 2, net.kept_groups = 3, net.scale = 2.5f;
            net.bias = numbers(NUM_TYPES), net.shared = SHARED;
        }
        memcpy(all, before, 4 * MANY * SIZE);
        headlong_experts(&net, x, logits, all, MANY, 1);
        tell("experts", 'f', all, MANY * SIZE);
        memcpy(some, before, 4 * MANY * SIZE);
        headlong_experts(&net, x, logits, some, MANY, THREADS);
        same("experts", all, some, 4 * MANY * SIZE);
        memcpy(some, before, 4 * MANY * SIZE);
        const int wide = NUM_TYPES + (net.shared == GATED);
        for (int i = 0; i < MANY; i++)
            headlong_experts(&net, x + i * SIZE, logits + i * wide, some + i * SIZE, 1, 1 + i % THREADS);
        same("experts", all, some, 4 * MANY * SIZE);
    }
}

static void programs(void) {
    enum { SIZE = 128, WIDE = 192, NORM = 0, MATMUL = 1, SILU_MUL = 2, EXPERTS = 5 };
    Matrix up = matrix(U4_OFFSET, HALF, SIZE, 2 * WIDE), down = matrix(I8, HALF, WIDE, SIZE);
    Matrix gates = matrix(F32, FLOAT, SIZE, NUM_TYPES + 1);
    Experts net = all_experts(SIZE);
    float *stream = numbers(TOKENS * SIZE), *first = room(4 * TOKENS * 2 * WIDE), *second = room(4 * TOKENS * 2 * WIDE);
    float *buffers[] = {stream, first, second};
    Instruction program[] = {{NORM, 0, 1, -1, SIZE, SIZE, 0, 0, numbers(SIZE), 1e-4},
                             {MATMUL, 1, 2, -1, 2 * WIDE, 2 * WIDE, 0, 0, &up, 0.0},
                             {SILU_MUL, 2, 1, -1, WIDE, WIDE, 0, 0, 0, 0.0},
                             {MATMUL, 1, 0, -1, SIZE, SIZE, 0, 1, &down, 0.0},
                             {NORM, 0, 1, -1, SIZE, SIZE, 0, 0, numbers(SIZE), 1e-4},
                             {MATMUL, 1, 2, -1, NUM_TYPES + 1, NUM_TYPES + 1, 0, 0, &gates, 0.0},
                             {EXPERTS, 1, 0, 2, SIZE, SIZE, 0, 0, &net, 0.0}};
    Step step = step_over(0, 0, THREADS);
    headlong_run(program, sizeof program / sizeof *program, buffers, TOKENS, &step);
    tell("run", 'f', stream, TOKENS * SIZE);
}

int main(void) {
    products();
    layouts();
    small();
    delta_nets();
    attentions();
    latents();
    experts();
    programs();
    return 0;
}
