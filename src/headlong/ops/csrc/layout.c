/* Lays out rows of a weight as matmul.h describes: 64 outputs side by side.
 *
 * Legend. A row is num_units units of unit_size bytes; `outs` [num_rows] is the output that each row becomes. */
#include <stdint.h>
#include <string.h>

#include "matmul.h"
#include "threads.h"

typedef struct {
    const uint8_t *from;
    const int64_t *outs;
    int64_t units, unit_size;
    uint8_t *to;
} Rows;

enum { ROWS_AT_ONCE = 16 };

/* Copies sixteen rows at a time, whose units fill whole cache lines. A constant unit_size makes each copy one
 * instruction. */
static inline __attribute__((always_inline)) void lay_out_rows(const Rows *r, int64_t first, int64_t last,
                                                               int64_t unit_size) {
    const int64_t length = r->units * unit_size;
    for (int64_t begin = first; begin < last; begin += ROWS_AT_ONCE) {
        const int64_t count = last - begin < ROWS_AT_ONCE ? last - begin : ROWS_AT_ONCE;
        const uint8_t *from = r->from + begin * length;
        uint8_t *to[ROWS_AT_ONCE];
        int adjacent = count == ROWS_AT_ONCE;
        for (int64_t row = 0; row < count; row++) {
            const int64_t out = r->outs[begin + row];
            to[row] = r->to + (out / WIDTH * r->units * WIDTH + out % WIDTH) * unit_size;
            adjacent = adjacent && to[row] == to[0] + row * unit_size;
        }
        if (adjacent)
            for (int64_t i = 0; i < r->units; i++)
                for (int64_t row = 0; row < ROWS_AT_ONCE; row++)
                    memcpy(to[0] + (i * WIDTH + row) * unit_size, from + row * length + i * unit_size, unit_size);
        else
            for (int64_t i = 0; i < r->units; i++)
                for (int64_t row = 0; row < count; row++)
                    memcpy(to[row] + i * WIDTH * unit_size, from + row * length + i * unit_size, unit_size);
    }
}

static void lay_out_any(const void *arg, int64_t first, int64_t last) {
    const Rows *r = arg;
    switch (r->unit_size) {
    case 1: lay_out_rows(r, first, last, 1); break;
    case 2: lay_out_rows(r, first, last, 2); break;
    default: lay_out_rows(r, first, last, 4);
    }
}

/* Lays out floats and codes: row i of `from` becomes output `outs[i]` of `to`. */
void headlong_lay_out(const uint8_t *from, const int64_t *outs, int64_t num_rows, int64_t units, int64_t unit_size,
                      uint8_t *to, int num_threads) {
    Rows arg = {from, outs, units, unit_size, to};
    parallel_for(lay_out_any, &arg, num_rows, WIDTH, num_threads);
}

typedef struct {
    const uint8_t *from;
    const int64_t *outs;
    const Matrix *w;
} Blocks;

/* Copies sixteen rows at a time, whose units fill whole cache lines. `type` is constant. */
static inline __attribute__((always_inline)) void lay_out_blocks(const Blocks *b, int64_t first, int64_t last,
                                                                 int type) {
    const int64_t groups = b->w->num_ins / PIECE, units = PIECE / (type == I8 ? UNIT : 2 * UNIT);
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
                    uint32_t unit_size;
                    memcpy(&unit_size, from + head + i * UNIT, UNIT);
                    if (type == I8) unit_size ^= 0x80808080; /* codes are unsigned: value + 128 */
                    memcpy(codes + (at * units + i * WIDTH + lane) * UNIT, &unit_size, UNIT);
                }
            }
}

static void lay_out_any_blocks(const void *arg, int64_t first, int64_t last) {
    const Blocks *b = arg;
    switch (b->w->type) {
    case I8: lay_out_blocks(b, first, last, I8); break;
    case U4: lay_out_blocks(b, first, last, U4); break;
    default: lay_out_blocks(b, first, last, U4_OFFSET);
    }
}

/* Lays out rows that are blocks of 32 codes, as GGUF files have them: Q8_0 where `w` is I8, Q4_0 where it is U4 and
 * Q4_1 where it is U4_OFFSET; its factors are HALF. */
void headlong_lay_out_blocks(const uint8_t *from, const int64_t *outs, int64_t num_rows, const Matrix *w,
                             int num_threads) {
    Blocks arg = {from, outs, w};
    parallel_for(lay_out_any_blocks, &arg, num_rows, WIDTH, num_threads);
}
