/* How a feed-forward gates; ops/silu_mul/activation.py defines it, and ops/silu_mul/native.py mirrors this structure. */
#ifndef HEADLONG_ACTIVATION_H
#define HEADLONG_ACTIVATION_H
#include <stdint.h>

typedef struct {
    float alpha, limit, plus;
} Activation;

/* Defined in program.c: the activation of gate and up side by side in each of `num_rows` rows; without one, silu(gate)
 * up. */
void headlong_silu_mul(const float *gate_up, float *out, int64_t num_rows, int64_t hidden_size, const Activation *how,
                       int num_threads);

#endif
