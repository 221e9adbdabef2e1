/* A thread team: fast alone, civil in company. The caller is member 0; the others wait between runs.
 *
 * A waiter spins briefly, then sleeps on a futex. How long it spins adapts: a wait that ended asleep halves the
 * budget, one that ended in the spin doubles it, so on a crowded machine members give their core away at once. */
#ifndef ST_TEAM_H
#define ST_TEAM_H

#include "strata.h"

typedef struct st_team st_team;

/* A team of n members (1..512), n - 1 of them threads made here. NULL and err (no_memory) when threads cannot start. */
st_team *st_team_new(int n, st_error *err);
void st_team_free(st_team *t);
int st_team_size(const st_team *t);

/* Run fn(arg, member, size) on every member and return when all are done. */
void st_team_run(st_team *t, void (*fn)(void *arg, int member, int size), void *arg);

/* Inside fn: wait for every member. */
void st_team_barrier(st_team *t, int member);

/* Processors this process may run on. */
int st_team_processors(void);

/* The part [*lo, *hi) of `total` items that falls to a member. */
static inline void st_share(int total, int member, int size, int *lo, int *hi) {
    *lo = (int)((long long)total * member / size);
    *hi = (int)((long long)total * (member + 1) / size);
}

#endif
