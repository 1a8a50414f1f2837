/* y = x Wᵀ for a W that was laid out for it at load. */
#ifndef HEADLONG_MATMUL_H
#define HEADLONG_MATMUL_H
#include <stdint.h>

/* What a weight is stored as: floats, or codes that have a scale for every `group` of them and, in I8_OFFSET and
 * U4_OFFSET, an offset that is added. Codes are unsigned: I8 and I8_OFFSET mean code - 128, U4 means code - 8.
 * BF16_ROUNDED is BF16 whose activations may be rounded to bfloat16, where the CPU multiplies it. */
enum { F32, F16, BF16, BF16_ROUNDED, I8, I8_OFFSET, U4, U4_OFFSET, NUM_TYPES };

/* What scales and offsets are; PARTS: int8, times a float16 that `span` groups share. */
enum { FLOAT, HALF, PARTS };

/* 64 outputs side by side: [outs / 64, size, 64], rounded up. Two weights of an output stay together in BF16, which is
 * [outs / 64, size / 2, 64, 2], and the codes in 4 bytes: [outs / 64, units, 64, 4]. Scales and offsets are
 * [outs / 64, size / group, 64], what their parts are multiplied with [outs / 64, size / group / span, 64].
 *
 * Every group of codes has room for a multiple of 8, and is cut into pieces of 32, the last one what is left. Codes of
 * 4 bits have a piece's first half in the low ends of its bytes and its second half in the high ones. */
enum { WIDTH = 64, PIECE = 32, UNIT = 4 };

typedef struct {
    int64_t type, size, outs, group, factors, span;
    const uint8_t *codes, *scales, *offsets, *scale_wholes, *offset_wholes;
    const float *bias; /* or null */
} Matrix;

static inline int64_t room_of(int64_t group) { return (group + 7) / 8 * 8; }

/* Units of an output. */
static inline int64_t units_of(const Matrix *w) {
    return w->size / w->group * room_of(w->group) / (w->type < U4 ? UNIT : 2 * UNIT);
}

typedef struct {
    int64_t unit, shift;
} Place;

/* Of code `i` of a group: its unit and its lowest bit there. */
static inline Place place_of(int64_t type, int64_t group, int64_t number, int64_t i) {
    const int64_t room = room_of(group), begin = number * room;
    if (type < U4) return (Place){(begin + i) / UNIT, i % UNIT * 8};
    const int64_t piece = i / PIECE * PIECE, half = (room - piece < PIECE ? room - piece : PIECE) / 2;
    const int64_t high = i - piece >= half, byte = i - piece - high * half;
    return (Place){(begin + piece) / (2 * UNIT) + byte / UNIT, byte % UNIT * 8 + high * 4};
}

/* `add`: to what is in y. Rows of y are `stride` apart. */
void multiply(const Matrix *w, const float *x, int64_t rows, float *y, int64_t stride, int add, int threads);

#endif
