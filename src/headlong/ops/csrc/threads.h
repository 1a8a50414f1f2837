/* Work that is split between threads. Which thread does what never changes a result. */
#ifndef HEADLONG_THREADS_H
#define HEADLONG_THREADS_H
#include <stdint.h>

typedef void (*Work)(const void *given, int64_t first, int64_t last);

/* Does `work` on all of 0…count − 1, in parts of whole `grain`s, on at most so many threads, this one among them. */
void share(Work work, const void *given, int64_t count, int64_t grain, int threads);

#endif
