/* The memory plan: what weights, page pool, slots' states, drafters and buffers take, and how many slots fit. Pure
 * arithmetic, shared with the daemon through strata_native. */
#ifndef ST_PLAN_H
#define ST_PLAN_H

#include "session.h"
#include "strata.h"

/* The plan's inputs from a model's shape. */
void st_plan_shape(const st_shape *shape, st_plan_in *in);
/* Bytes of memory that could be taken now (MemAvailable, or the cgroup's limit where it is lower). 0: unknown. */
uint64_t st_plan_available(void);

#endif
