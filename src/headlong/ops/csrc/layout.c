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

/* A constant unit makes its copy one instruction. */
static inline __attribute__((always_inline)) void place(const Rows *r, int64_t first, int64_t last, int64_t unit) {
    for (int64_t row = first; row < last; row++) {
        const int64_t out = r->outs[row], lane = out % WIDTH;
        const uint8_t *from = r->from + row * r->units * unit;
        uint8_t *to = r->to + (out / WIDTH * r->units * WIDTH + lane) * unit;
        for (int64_t i = 0; i < r->units; i++) memcpy(to + i * WIDTH * unit, from + i * unit, unit);
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

enum { GROUP = 32, LANES = 16 }; /* codes of a block, and rows that become as many lanes at a time */
typedef uint8_t Bytes __attribute__((vector_size(LANES)));
#if defined(__clang__)
#define CHOOSE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else /* of all versions of GCC */
#define CHOOSE(a, b, ...) __builtin_shuffle(a, b, (Bytes){__VA_ARGS__})
#endif

typedef struct {
    const uint8_t *from;
    const int64_t *outs;
    const Matrix *w;
} Blocks;

/* Byte j of vector i becomes byte i of vector j: four times the first half is laced with the second. */
static inline void transpose(Bytes *v) {
    for (int turn = 0; turn < 4; turn++) {
        Bytes laced[LANES];
        for (int i = 0; i < LANES / 2; i++) {
            const Bytes a = v[i], b = v[i + LANES / 2];
            laced[2 * i] = CHOOSE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            laced[2 * i + 1] = CHOOSE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        }
        memcpy(v, laced, sizeof laced);
    }
}

/* Sixteen blocks whose codes are `apart` to as many lanes. Codes of 4 bits are in a block's bytes the first half low,
 * the second half high; here two neighbours share a byte. */
static inline __attribute__((always_inline)) void place_lanes(const uint8_t *from, int64_t apart, uint8_t *to, int type) {
    for (int64_t part = 0; part < (type == I8 ? GROUP / LANES : 1); part++) {
        Bytes v[LANES];
        for (int i = 0; i < LANES; i++) memcpy(v + i, from + i * apart + part * LANES, LANES);
        transpose(v);
        for (int i = 0; i < LANES; i++) {
            const Bytes one = v[2 * i % LANES], two = v[2 * i % LANES + 1];
            const Bytes pairs = i < LANES / 2 ? (one & 15) | two << 4 : one >> 4 | (two & 0xF0);
            memcpy(to + (part * LANES + i) * WIDTH, type == I8 ? v + i : &pairs, LANES);
        }
    }
}

static inline __attribute__((always_inline)) void place_lane(const uint8_t *from, uint8_t *to, int type) {
    if (type == I8)
        for (int64_t i = 0; i < GROUP; i++) to[i * WIDTH] = from[i];
    else
        for (int64_t i = 0; i < GROUP / 4; i++) {
            const uint8_t one = from[2 * i], two = from[2 * i + 1];
            to[i * WIDTH] = (uint8_t)((one & 15) | two << 4);
            to[(i + GROUP / 4) * WIDTH] = (uint8_t)(one >> 4 | (two & 0xF0));
        }
}

static int side_by_side(const int64_t *outs) {
    for (int i = 1; i < LANES; i++)
        if (outs[i] != outs[0] + i) return 0;
    return outs[0] % LANES == 0;
}

static inline __attribute__((always_inline)) void place_blocks(const Blocks *b, int64_t first, int64_t last, int type) {
    const int64_t groups = b->w->size / GROUP, length = type == I8 ? GROUP : GROUP / 2;
    const int64_t head = type == U4_OFFSET ? 4 : 2, apart = groups * (head + length);
    uint8_t *codes = (uint8_t *)b->w->codes, *scales = (uint8_t *)b->w->scales, *offsets = (uint8_t *)b->w->offsets;
    for (int64_t begin = first; begin < last; begin += LANES) {
        const int64_t end = begin + LANES < last ? begin + LANES : last;
        const int together = end - begin == LANES && side_by_side(b->outs + begin);
        for (int64_t group = 0; group < groups; group++)
            for (int64_t row = begin; row < end; row++) {
                const int64_t out = b->outs[row], at = (out / WIDTH * groups + group) * WIDTH, lane = out % WIDTH;
                const uint8_t *from = b->from + row * apart + group * (head + length);
                uint8_t *to = codes + at * length + lane;
                memcpy(scales + 2 * (at + lane), from, 2);
                if (type == U4_OFFSET) memcpy(offsets + 2 * (at + lane), from + 2, 2);
                if (!together)
                    place_lane(from + head, to, type);
                else if (row == begin)
                    place_lanes(from + head, apart, to, type);
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
