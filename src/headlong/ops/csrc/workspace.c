#include "workspace.h"

#include <stdlib.h>

float *workspace(int room, int64_t count) {
    static _Thread_local float *rooms[NUM_ROOMS];
    static _Thread_local int64_t sizes[NUM_ROOMS];
    if (count > sizes[room]) {
        free(rooms[room]);
        rooms[room] = aligned_alloc(64, (count * sizeof(float) + 63) / 64 * 64);
        if (!rooms[room]) abort();
        sizes[room] = count;
    }
    return rooms[room];
}
