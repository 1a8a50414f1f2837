/* Small functions of floats, written so that compilers vectorise the loops that call them. */
#ifndef HEADLONG_ARITHMETIC_H
#define HEADLONG_ARITHMETIC_H
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
/* The function is compiled several times; the loader picks the widest version that this CPU runs. */
#define VECTORISED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define VECTORISED
#endif
#define INLINE static inline __attribute__((always_inline))

INLINE float from_bf16(uint16_t h) {
    uint32_t bits = (uint32_t)h << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

INLINE uint16_t to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
}

/* e^x for x cut to [-87, 87]: 2^n e^r with |r| <= ln2 / 2, e^r by its series to the seventh power; about one unit
 * in the last place. Cut in integers and without a branch, or the loops around it stay scalar. */
INLINE float exponential(float input) {
    uint32_t bits;
    memcpy(&bits, &input, 4);
    uint32_t magnitude = bits & 0x7FFFFFFF, limit = 0x42AE0000; /* 87.0f */
    bits = (bits & 0x80000000) | (magnitude < limit ? magnitude : limit);
    float x;
    memcpy(&x, &bits, 4);
    int32_t n = (int32_t)(x * 1.44269504f + copysignf(0.5f, x));
    float r = x - (float)n * 0.693147181f;
    float y = 1.0f / 5040.0f;
    y = y * r + 1.0f / 720.0f;
    y = y * r + 1.0f / 120.0f;
    y = y * r + 1.0f / 24.0f;
    y = y * r + 1.0f / 6.0f;
    y = y * r + 0.5f;
    y = y * r + 1.0f;
    y = y * r + 1.0f;
    bits = (uint32_t)(n + 127) << 23;
    float scale;
    memcpy(&scale, &bits, 4);
    return y * scale + (input - input); /* NaN stays NaN */
}

INLINE float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }
INLINE float silu(float x) { return x / (1.0f + exponential(-x)); }
INLINE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

INLINE float dot(const float *a, const float *b, int64_t count) {
    float sum = 0.0f;
    for (int64_t i = 0; i < count; i++) sum += a[i] * b[i];
    return sum;
}

#endif
