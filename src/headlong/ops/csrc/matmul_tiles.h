/* The GEMM of bfloat16 on CPUs that multiply tiles of it (AMX): up to sixteen rows cost what one does.
 *
 * A tile of sums holds 16 outputs of each row; four are a block's. One instruction adds 32 products to each sum: those
 * of even places one after the other, those of odd ones likewise, then both, rounded each time and with numbers below
 * the smallest normal one taken as 0. For few rows, which do not fill a tile, the same sums are made by ordinary
 * instructions: same order, same roundings, same bits. So a row's bits do not depend on the rows beside it.
 */
#include <sys/syscall.h>
#include <unistd.h>

enum {
    TILE_ROWS = 16,
    UNTILED_ROWS = 2,  /* up to this many rows are multiplied without tiles */
    TILE_BLOCK_K = 256 /* inputs that all rows are multiplied with before the next ones are read: they stay in L1 */
};

typedef struct {
    uint8_t palette, start, unused[14];
    uint16_t bytes[16]; /* the bytes of a tile's row */
    uint8_t rows[16];
} TileShapes;

/* Tiles 0 to 3 are sums, 4 activations, 5 to 7 weights. */
INLINE void shape_tiles(int64_t rows) {
    TileShapes shapes = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        shapes.bytes[tile] = 64;
        shapes.rows[tile] = tile < 5 ? (uint8_t)rows : TILE_ROWS;
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(shapes));
}

#define LOAD_TILE(tile, at, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(at), "r"((int64_t)(stride)) : "memory")
#define STORE_TILE(tile, at, stride) \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(at), "r"((int64_t)(stride)) : "memory")
#define ADD_TILE(sum, weights, at)                  \
    LOAD_TILE(weights, (at) + 64 * sum, 4 * WIDTH); \
    __asm__ volatile("tdpbf16ps %%tmm" #weights ", %%tmm4, %%tmm" #sum ::: "memory")

/* Multiplies as many rows as the tiles have, whose `pairs` begin at x, with weights [first, last) of a block. */
INLINE void tile_rows(const uint8_t *codes, const uint16_t *x, int64_t size, int64_t first, int64_t last, float *sums) {
    LOAD_TILE(0, sums, 4 * WIDTH);
    LOAD_TILE(1, sums + 16, 4 * WIDTH);
    LOAD_TILE(2, sums + 32, 4 * WIDTH);
    LOAD_TILE(3, sums + 48, 4 * WIDTH);
    for (int64_t k = first; k < last; k += TILE_STEP) {
        const uint8_t *at = codes + 2 * k * WIDTH;
        LOAD_TILE(4, x + k, 2 * size);
        ADD_TILE(0, 5, at);
        ADD_TILE(1, 6, at);
        ADD_TILE(2, 7, at);
        ADD_TILE(3, 5, at);
    }
    STORE_TILE(0, sums, 4 * WIDTH);
    STORE_TILE(1, sums + 16, 4 * WIDTH);
    STORE_TILE(2, sums + 32, 4 * WIDTH);
    STORE_TILE(3, sums + 48, 4 * WIDTH);
}
#undef LOAD_TILE
#undef STORE_TILE
#undef ADD_TILE

/* Does what tile_rows does, for `rows` rows and all inputs. */
INLINE void few_rows(int rows, const uint8_t *codes, const uint32_t *x, int64_t size, float *sums) {
    const __m512i high = _mm512_set1_epi32((int32_t)0xFFFF0000);
    for (int64_t begin = 0; begin < size / 2; begin += TILE_STEP / 2) {
        __m512 even[4 * UNTILED_ROWS], odd[4 * UNTILED_ROWS];
#pragma GCC unroll 8
        for (int i = 0; i < 4 * rows; i++) even[i] = odd[i] = _mm512_setzero_ps();
        for (int64_t k = begin; k < begin + TILE_STEP / 2; k++)
#pragma GCC unroll 4
            for (int p = 0; p < 4; p++) {
                const __m512i two = _mm512_loadu_si512(codes + 4 * k * WIDTH + 64 * p);
                const __m512 w0 = (__m512)_mm512_slli_epi32(two, 16), w1 = (__m512)_mm512_and_si512(two, high);
#pragma GCC unroll 2
                for (int m = 0; m < rows; m++) {
                    const uint32_t pair = x[m * size / 2 + k];
                    const __m512 x0 = (__m512)_mm512_set1_epi32((int32_t)(pair << 16));
                    const __m512 x1 = (__m512)_mm512_set1_epi32((int32_t)(pair & 0xFFFF0000));
                    even[4 * m + p] = _mm512_fmadd_ps(x0, w0, even[4 * m + p]);
                    odd[4 * m + p] = _mm512_fmadd_ps(x1, w1, odd[4 * m + p]);
                }
            }
#pragma GCC unroll 8
        for (int i = 0; i < 4 * rows; i++) {
            float *at = sums + i / 4 * WIDTH + i % 4 * 16;
            _mm512_storeu_ps(at, _mm512_add_ps(_mm512_loadu_ps(at), _mm512_add_ps(even[i], odd[i])));
        }
    }
}

/* These are not inlined, so that the compiler moves no arithmetic to where subnormal numbers are not flushed to 0. */
__attribute__((noinline)) static void one_row(const GemmCall *job, const uint8_t *codes, float *sums) {
    few_rows(1, codes, job->pairs, job->w->num_ins, sums);
}
__attribute__((noinline)) static void two_rows(const GemmCall *job, const uint8_t *codes, float *sums) {
    few_rows(2, codes, job->pairs, job->w->num_ins, sums);
}

/* Computes blocks of outputs for up to UNTILED_ROWS rows. */
static void few_row_blocks(const GemmCall *job, int64_t begin, int64_t end) {
    const unsigned saved_csr = _mm_getcsr();
    float sums[UNTILED_ROWS * WIDTH];
    for (int64_t block = begin; block < end; block++) {
        const uint8_t *codes = job->w->codes + block * 2 * job->w->num_ins * WIDTH;
        memset(sums, 0, sizeof sums);
        _mm_setcsr(saved_csr | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON);
        (job->num_rows == 1 ? one_row : two_rows)(job, codes, sums);
        _mm_setcsr(saved_csr);
        store_block_bf16(job, block, sums);
    }
}

/* Computes blocks of outputs, sixteen rows at a time, then the rest. */
static void tile_blocks(const void *arg, int64_t begin, int64_t end) {
    const GemmCall *job = arg;
    const int64_t size = job->w->num_ins, rows = job->num_rows;
    if (rows <= UNTILED_ROWS) {
        few_row_blocks(job, begin, end);
        return;
    }
    float *sums = workspace(SUMS, rows * WIDTH);
    int64_t shaped = 0;
    for (int64_t block = begin; block < end; block++) {
        const uint8_t *codes = job->w->codes + block * 2 * size * WIDTH;
        memset(sums, 0, rows * WIDTH * sizeof(float));
        for (int64_t first = 0; first < size; first += TILE_BLOCK_K) {
            const int64_t last = first + TILE_BLOCK_K < size ? first + TILE_BLOCK_K : size;
            for (int64_t m = 0; m < rows; m += TILE_ROWS) {
                const int64_t count = rows - m < TILE_ROWS ? rows - m : TILE_ROWS;
                if (count != shaped) shape_tiles(shaped = count);
                tile_rows(codes, (const uint16_t *)job->pairs + m * size, size, first, last, sums + m * WIDTH);
            }
        }
        store_block_bf16(job, block, sums);
    }
    __asm__ volatile("tilerelease");
}

/* Asks the kernel for permission to use tiles, whose state makes context switches larger. */
static int tiles_are_permitted(void) {
    enum { ASK_FOR_STATE = 0x1023, TILE_DATA = 18 };
    return syscall(SYS_arch_prctl, ASK_FOR_STATE, TILE_DATA) == 0;
}
