/* The GEMM y = x Wᵀ: weights are read once for up to six rows of x.
 *
 * Every output is summed up in one order whatever else is computed with it, so its bits depend on its own row of x
 * and its own row of W alone, not on the number of rows or threads. Activations and sums are float; only where weights
 * are bfloat16 and may meet bfloat16 are activations rounded to it, which some CPUs multiply by tiles (matmul_tiles.h),
 * and where the CPU multiplies bytes, codes meet activations as whole numbers with as many bits as a float has
 * (matmul_digits.h).
 */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-associative-math")
#pragma GCC diagnostic ignored "-Wpsabi" /* wide vectors are never passed to another file */
#endif
#include "matmul.h"

#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "threads.h"
#include "workspace.h"

#define INLINE static inline __attribute__((always_inline))

enum {
    MAX_ROWS = 6,    /* rows that are multiplied at a time */
    FEW_ROWS = 12,   /* up to this many rows, weights are decoded again rather than stored */
    BLOCK_K = 512,   /* inputs that all rows are multiplied with before the next ones are read; even */
    SHARED_ROWS = 8, /* fewer rows are gathered or rounded by one thread */
    TILE_STEP = 32,  /* inputs of one tile instruction */
};

typedef struct Piece Piece;
typedef struct {
    const Matrix *w;
    const float *x;
    uint32_t *pairs; /* x as bfloat16, two to a word, for BF16_ROUNDED */
    Piece *pieces;   /* x as digits, where codes are multiplied as bytes */
    float *y;
    int64_t num_rows, stride_y;
    int add;
} GemmCall;

typedef struct {
    Work blocks[NUM_TYPES], round_rows; /* null where the CPU has no bfloat16 instructions */
} Version;

typedef struct {
    Work split_rows, blocks[NUM_TYPES]; /* null where codes are no whole numbers */
    int64_t (*bytes_per_row)(const Matrix *w); /* the bytes that a row's pieces take */
} Digits;
static const Digits *digits; /* null where the CPU has no byte dot products */
static Work tiles;           /* for rounded rows; null where the CPU has no bfloat16 tiles */

#define VERSION(name) name##_plain
#include "matmul_kernels.h"
#undef VERSION
static const Version *version = &version_plain;

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")
#define VERSION(name) name##_bf16
#include "matmul_kernels.h"
#undef VERSION
#if defined(__linux__) && __GNUC__ > 10
#define TILES
#include "matmul_tiles.h"
#endif
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")
#define VERSION(name) name##_avx512
#include "matmul_kernels.h"
#undef VERSION
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
#include "matmul_digits.h"
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define VERSION(name) name##_avx2
#include "matmul_kernels.h"
#undef VERSION
#pragma GCC pop_options

__attribute__((constructor)) static void choose(void) {
    __builtin_cpu_init();
    int wide = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vl");
    if (wide && __builtin_cpu_supports("avx512bf16"))
        version = &version_bf16;
    else if (wide)
        version = &version_avx512;
    else if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        version = &version_avx2;
    if (wide && __builtin_cpu_supports("avx512vnni")) digits = &digits_vnni;
#if defined(TILES)
    if (version->round_rows && __builtin_cpu_supports("amx-bf16") && tiles_are_permitted()) tiles = tile_blocks;
#endif
}
#endif

typedef struct {
    const Matrix *w;
    const float *from;
    float *to;
} Gather;

/* Brings the numbers of rows into the order of a weight's columns. */
static void gather_rows(const void *arg, int64_t first, int64_t last) {
    const Gather *g = arg;
    const int32_t *columns = g->w->columns;
    const float *factors = g->w->column_factors;
    for (int64_t row = first; row < last; row++) {
        const float *from = g->from + row * g->w->row_size;
        float *to = g->to + row * g->w->num_ins;
        for (int64_t k = 0; k < g->w->num_ins; k++) {
            const float number = columns[k] < 0 ? 0.0f : from[columns[k]];
            to[k] = factors ? number * factors[k] : number;
        }
    }
}

void gemm(const Matrix *w, const float *x, int64_t num_rows, float *y, int64_t stride_y, int add, int num_threads) {
    if (w->columns) {
        Gather gather = {w, x, workspace(GATHERED, num_rows * w->num_ins)};
        parallel_for(gather_rows, &gather, num_rows, SHARED_ROWS, num_threads);
        x = gather.to;
    }
    GemmCall product = {w, x, 0, 0, y, num_rows, stride_y, add};
    Work blocks = version->blocks[w->type];
    if (w->type == BF16_ROUNDED && version->round_rows) {
        product.pairs = (uint32_t *)workspace(PAIRS, (num_rows * w->num_ins + 1) / 2);
        parallel_for(version->round_rows, &product, num_rows, SHARED_ROWS, num_threads);
        if (tiles && w->num_ins % TILE_STEP == 0) blocks = tiles;
    } else if (digits && digits->blocks[w->type]) {
        product.pieces = (Piece *)workspace(PIECES, num_rows * digits->bytes_per_row(w) / 4);
        parallel_for(digits->split_rows, &product, num_rows, SHARED_ROWS, num_threads);
        blocks = digits->blocks[w->type];
    }
    parallel_for(blocks, &product, (w->num_outs + WIDTH - 1) / WIDTH, 1, num_threads);
}

void headlong_matmul(const Matrix *w, const float *x, int64_t num_rows, float *y, int64_t stride_y, int num_threads) {
    gemm(w, x, num_rows, y, stride_y, 0, num_threads);
}
