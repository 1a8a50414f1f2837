/* y = x Wᵀ for a W that was laid out for it at load. */
#ifndef HEADLONG_MATMUL_H
#define HEADLONG_MATMUL_H
#include <stdint.h>

/* What a weight is stored as: floats, or codes that have a scale for every `group` of them and, in I8_OFFSET and
 * U4_OFFSET, an offset that is added; U4 means code - 8. BF16_ROUNDED is BF16 whose activations may be rounded to
 * bfloat16, where the CPU multiplies it. */
enum { F32, F16, BF16, BF16_ROUNDED, I8, I8_OFFSET, U4, U4_OFFSET, NUM_TYPES };

/* What scales and offsets are; PARTS: int8, times a float16 that `span` groups share. */
enum { FLOAT, HALF, PARTS };

/* 64 outputs side by side: [outs / 64, size, 64], rounded up. Two weights of an output stay together in BF16, which is
 * [outs / 64, size / 2, 64, 2], and in codes of 4 bits, where they are a byte, the first one low. Scales and offsets are
 * [outs / 64, size / group, 64], what their parts are multiplied with [outs / 64, size / group / span, 64]. */
enum { WIDTH = 64 };

typedef struct {
    int64_t type, size, outs, group, factors, span;
    const uint8_t *codes, *scales, *offsets, *scale_wholes, *offset_wholes;
    const float *bias; /* or null */
} Matrix;

/* `add`: to what is in y. Rows of y are `stride` apart. */
void multiply(const Matrix *w, const float *x, int64_t rows, float *y, int64_t stride, int add, int threads);

#endif
