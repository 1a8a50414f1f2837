/* The GEMM y = x Wᵀ for a W that was laid out for it at load. */
#ifndef HEADLONG_MATMUL_H
#define HEADLONG_MATMUL_H
#include <stdint.h>

/* How a weight is stored: floats, or codes that have a scale for every `group` of them and, in I8_OFFSET and
 * U4_OFFSET, an offset that is added. Codes are unsigned: I8 and I8_OFFSET mean code - 128, U4 means code - 8. Codes of
 * E4M3 and E5M2 are finite floats of that name; a code of U4_TABLE stands for one of the 16 numbers of `table`.
 * BF16_ROUNDED is BF16 whose activations may be rounded to bfloat16, where the CPU multiplies it. */
enum { F32, F16, BF16, BF16_ROUNDED, I8, I8_OFFSET, E4M3, E5M2, U4, U4_OFFSET, U4_TABLE, NUM_TYPES };

/* How scales and offsets are stored. PARTS are int8, each times a float16 that `span` groups share. */
enum { FLOAT, HALF, PARTS };

/* Weights have 64 outputs side by side: [num_outs / 64, num_ins, 64], rounded up. Two weights of an output stay
 * together in BF16, which is [num_outs / 64, num_ins / 2, 64, 2], and the codes in units of 4 bytes: [num_outs / 64,
 * units, 64, 4]. Scales and offsets are [num_outs / 64, num_ins / group, 64], the factors of their parts [num_outs /
 * 64, num_ins / group / span, 64].
 *
 * Every group of codes is padded to a multiple of 8 and cut into pieces of 32, the last of which may be shorter. Codes
 * of 4 bits have a piece's first half in the low ends of its bytes and its second half in the high ones. */
enum { WIDTH = 64, PIECE = 32, UNIT = 4 };

/* Where there are `columns`, rows of x are gathered before they are multiplied: input k is number columns[k] of a row, 0
 * where that is negative, and times column_factors[k] where these are not null. `row_size` is how many numbers a row of x
 * has, which is num_ins without columns. */
typedef struct {
    int64_t type, num_ins, num_outs, group, factors, span, row_size;
    const uint8_t *codes, *scales, *offsets, *scale_factors, *offset_factors;
    const float *bias;  /* or null */
    const float *table; /* null but for U4_TABLE */
    const int32_t *columns;      /* or null */
    const float *column_factors; /* or null */
} Matrix;

static inline int64_t padded_group(int64_t group) { return (group + 7) / 8 * 8; }

/* The number of units of one output. */
static inline int64_t units_per_output(const Matrix *w) {
    return w->num_ins / w->group * padded_group(w->group) / (w->type < U4 ? UNIT : 2 * UNIT);
}

typedef struct {
    int64_t unit, shift;
} CodePosition;

/* The unit of code `i` of a group, and its lowest bit there. */
static inline CodePosition code_position(int64_t type, int64_t group, int64_t group_index, int64_t i) {
    const int64_t padded = padded_group(group), begin = group_index * padded;
    if (type < U4) return (CodePosition){(begin + i) / UNIT, i % UNIT * 8};
    const int64_t piece = i / PIECE * PIECE, half = (padded - piece < PIECE ? padded - piece : PIECE) / 2;
    const int64_t high = i - piece >= half, byte = i - piece - high * half;
    return (CodePosition){(begin + piece) / (2 * UNIT) + byte / UNIT, byte % UNIT * 8 + high * 4};
}

/* Computes y = x Wᵀ + bias, or with `add` adds that to y. Rows of y are `stride_y` numbers apart. */
void gemm(const Matrix *w, const float *x, int64_t num_rows, float *y, int64_t stride_y, int add, int num_threads);

#endif
