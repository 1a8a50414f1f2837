/* Room for floats that every thread keeps from call to call: fresh pages at every call would cost more than the work. */
#ifndef HEADLONG_WORKSPACE_H
#define HEADLONG_WORKSPACE_H
#include <stdint.h>

/* Whose; what one asks for stands until it asks again. */
enum { CORE, SUMS, VALUES, PAIRS, PIECES, ROUTES, EXPERT, OUTPUTS, PLACES, CANDIDATES, SCORES, NUM_ROOMS };

float *workspace(int room, int64_t count);

#endif
