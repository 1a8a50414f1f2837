#include "workspace.h"

#include <stdlib.h>

#ifndef HEADLONG_SOURCES
#define HEADLONG_SOURCES "" /* built otherwise than by setup.py */
#endif

/* A digest of the sources that the library was built from, or nothing. */
const char *headlong_sources(void) { return HEADLONG_SOURCES; }

float *workspace(int purpose, int64_t count) {
    static _Thread_local float *memory[NUM_WORKSPACES];
    static _Thread_local int64_t sizes[NUM_WORKSPACES];
    if (count > sizes[purpose]) {
        free(memory[purpose]);
        memory[purpose] = aligned_alloc(64, (count * sizeof(float) + 63) / 64 * 64);
        if (!memory[purpose]) abort();
        sizes[purpose] = count;
    }
    return memory[purpose];
}
