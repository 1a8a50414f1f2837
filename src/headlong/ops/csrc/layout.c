/* Lays rows of a weight out as matmul.h wants them. */
#include <stdint.h>
#include <string.h>

#include "matmul.h"
#include "threads.h"

typedef struct {
    const uint8_t *from;
    const int64_t *outs;
    int64_t units, unit;
    uint8_t *to;
} Rows;

enum { SIDE = 16 };

/* Sixteen rows at a time, whose units fill whole lines of the cache. A constant unit makes its copy one instruction. */
static inline __attribute__((always_inline)) void place(const Rows *r, int64_t first, int64_t last, int64_t unit) {
    const int64_t length = r->units * unit;
    for (int64_t begin = first; begin < last; begin += SIDE) {
        const int64_t count = last - begin < SIDE ? last - begin : SIDE;
        const uint8_t *from = r->from + begin * length;
        uint8_t *to[SIDE];
        int together = count == SIDE;
        for (int64_t row = 0; row < count; row++) {
            const int64_t out = r->outs[begin + row];
            to[row] = r->to + (out / WIDTH * r->units * WIDTH + out % WIDTH) * unit;
            together = together && to[row] == to[0] + row * unit;
        }
        if (together)
            for (int64_t i = 0; i < r->units; i++)
                for (int64_t row = 0; row < SIDE; row++)
                    memcpy(to[0] + (i * WIDTH + row) * unit, from + row * length + i * unit, unit);
        else
            for (int64_t i = 0; i < r->units; i++)
                for (int64_t row = 0; row < count; row++)
                    memcpy(to[row] + i * WIDTH * unit, from + row * length + i * unit, unit);
    }
}

static void place_rows(const void *given, int64_t first, int64_t last) {
    const Rows *r = given;
    switch (r->unit) {
    case 1: place(r, first, last, 1); break;
    case 2: place(r, first, last, 2); break;
    default: place(r, first, last, 4);
    }
}

/* Row i of `from`, `units` of `unit` bytes, becomes output `outs[i]` of `to`. */
void headlong_lay_out(const uint8_t *from, const int64_t *outs, int64_t rows, int64_t units, int64_t unit, uint8_t *to,
                      int threads) {
    Rows given = {from, outs, units, unit, to};
    share(place_rows, &given, rows, WIDTH, threads);
}

typedef struct {
    const uint8_t *from;
    const int64_t *outs;
    const Matrix *w;
} Blocks;

/* Sixteen rows at a time, whose units fill whole lines of the cache. */
static inline __attribute__((always_inline)) void place_blocks(const Blocks *b, int64_t first, int64_t last, int type) {
    const int64_t groups = b->w->size / PIECE, units = PIECE / (type == I8 ? UNIT : 2 * UNIT);
    const int64_t head = type == U4_OFFSET ? 4 : 2, length = head + units * UNIT;
    uint8_t *codes = (uint8_t *)b->w->codes, *scales = (uint8_t *)b->w->scales, *offsets = (uint8_t *)b->w->offsets;
    for (int64_t begin = first; begin < last; begin += 16)
        for (int64_t group = 0; group < groups; group++)
            for (int64_t row = begin; row < begin + 16 && row < last; row++) {
                const int64_t out = b->outs[row], at = (out / WIDTH * groups + group) * WIDTH, lane = out % WIDTH;
                const uint8_t *from = b->from + (row * groups + group) * length;
                memcpy(scales + 2 * (at + lane), from, 2);
                if (type == U4_OFFSET) memcpy(offsets + 2 * (at + lane), from + 2, 2);
                for (int64_t i = 0; i < units; i++) {
                    uint32_t unit;
                    memcpy(&unit, from + head + i * UNIT, UNIT);
                    if (type == I8) unit ^= 0x80808080; /* moved by 128 */
                    memcpy(codes + (at * units + i * WIDTH + lane) * UNIT, &unit, UNIT);
                }
            }
}

static void place_some_blocks(const void *given, int64_t first, int64_t last) {
    const Blocks *b = given;
    switch (b->w->type) {
    case I8: place_blocks(b, first, last, I8); break;
    case U4: place_blocks(b, first, last, U4); break;
    default: place_blocks(b, first, last, U4_OFFSET);
    }
}

/* The same for rows that are blocks of 32 codes, as GGUF files have them: Q8_0 where `w` is I8, Q4_0 where it is U4 and
 * Q4_1 where it is U4_OFFSET; its factors are HALF. */
void headlong_lay_out_blocks(const uint8_t *from, const int64_t *outs, int64_t rows, const Matrix *w, int threads) {
    Blocks given = {from, outs, w};
    share(place_some_blocks, &given, rows, WIDTH, threads);
}
