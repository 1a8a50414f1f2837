/* y = x Wᵀ: weights are read once for up to six rows of x.
 *
 * Every output is summed up in one order whatever else is computed beside it, so its bits depend on its own row of x
 * and its own row of W alone, not on the number of rows or threads. Activations and sums are float; only where weights
 * are bfloat16 and may meet bfloat16 are activations rounded to it, which some CPUs multiply by tiles (matmul_tiles.h),
 * and where the CPU multiplies bytes, codes meet activations as whole numbers with as many bits as a float has
 * (matmul_digits.h).
 */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-associative-math")
#pragma GCC diagnostic ignored "-Wpsabi" /* wide vectors never leave this file */
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
    MAX_ROWS = 6,    /* that are summed up at a time */
    FEW_ROWS = 12,   /* for which weights are rather decoded twice than written down */
    DEPTH = 512,     /* weights of an output that all rows meet before the next ones are read; even */
    SHARED_ROWS = 8, /* fewer rows are rounded by one thread */
    TILE_STEP = 32,  /* weights of an output that meet at a time where tiles do */
};

typedef struct Piece Piece;
typedef struct {
    const Matrix *w;
    const float *x;
    uint32_t *pairs; /* x as bfloat16, two together, where that is wanted */
    Piece *pieces;   /* x as digits, where codes meet them */
    float *y;
    int64_t rows, stride;
    int add;
} Product;

typedef struct {
    Work blocks[NUM_TYPES], round_rows; /* null where bfloat16 is not multiplied */
} Version;

typedef struct {
    Work split_rows, blocks[NUM_TYPES];
    int64_t (*bytes)(const Matrix *w); /* that a row's pieces take */
} Digits;
static const Digits *digits; /* null where bytes are not multiplied */
static Work tiles;           /* of rounded rows, where bfloat16 is multiplied by tiles */

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
    if (version->round_rows && __builtin_cpu_supports("amx-bf16") && tiles_are_granted()) tiles = tile_blocks;
#endif
}
#endif

void multiply(const Matrix *w, const float *x, int64_t rows, float *y, int64_t stride, int add, int threads) {
    Product product = {w, x, 0, 0, y, rows, stride, add};
    Work blocks = version->blocks[w->type];
    if (w->type == BF16_ROUNDED && version->round_rows) {
        product.pairs = (uint32_t *)workspace(PAIRS, (rows * w->size + 1) / 2);
        share(version->round_rows, &product, rows, SHARED_ROWS, threads);
        if (tiles && w->size % TILE_STEP == 0) blocks = tiles;
    } else if (w->type >= I8 && digits) {
        product.pieces = (Piece *)workspace(PIECES, rows * digits->bytes(w) / 4);
        share(digits->split_rows, &product, rows, SHARED_ROWS, threads);
        blocks = digits->blocks[w->type];
    }
    share(blocks, &product, (w->outs + WIDTH - 1) / WIDTH, 1, threads);
}

void headlong_matmul(const Matrix *w, const float *x, int64_t rows, float *y, int64_t stride, int threads) {
    multiply(w, x, rows, y, stride, 0, threads);
}
