/* Scratch memory that every thread keeps from call to call: fresh pages at every call would cost more than the work. */
#ifndef HEADLONG_WORKSPACE_H
#define HEADLONG_WORKSPACE_H
#include <stdint.h>

/* What scratch memory is for. Memory of one purpose is valid until the thread asks for that purpose again. */
enum {
    CORE,
    SUMS,
    VALUES,
    PAIRS,
    PIECES,
    GATHERED,
    ROUTES,
    EXPERT,
    OUTPUTS,
    BUCKETS_OF_TOKENS,
    CANDIDATES,
    SCORES,
    CHOICES,
    NUM_WORKSPACES
};

float *workspace(int purpose, int64_t count);

#endif
