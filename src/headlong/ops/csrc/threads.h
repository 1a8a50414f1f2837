/* A parallel loop. Which thread does which part never changes a result. */
#ifndef HEADLONG_THREADS_H
#define HEADLONG_THREADS_H
#include <stdint.h>

typedef void (*Work)(const void *arg, int64_t first, int64_t last);

/* Calls `work` for parts of 0…count − 1, each a multiple of `grain` long, on at most `num_threads` threads, this one
 * among them. */
void parallel_for(Work work, const void *arg, int64_t count, int64_t grain, int num_threads);

#endif
