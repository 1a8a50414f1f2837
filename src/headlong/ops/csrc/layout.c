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
