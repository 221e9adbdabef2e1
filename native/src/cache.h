/* The prompt cache: checkpoints of all conversations, found by token prefix, within a byte budget. */
#ifndef ST_CACHE_H
#define ST_CACHE_H

#include "session.h"

typedef struct st_cache st_cache;

/* `budget` bytes of checkpoints' own memory; 0 keeps none. */
st_cache *st_cache_new(const st_shape *shape, size_t budget);
/* Sessions' pools must still live. `any`: a session of the same shape and pools. */
void st_cache_free(st_cache *c, const st_session *any);

/* The longest checkpoint that is a beginning of ids[0..n) and leaves at least one token; NULL when there is none. */
const st_checkpoint *st_cache_find(st_cache *c, const int32_t *ids, int n);
/* Keep the session's state (settled) at its position, unless it is kept already. Older, less used ones make room. */
enum { ST_KEEP_ROOT = 1, ST_KEEP_PINNED = 2 };
void st_cache_put(st_cache *c, const st_session *s, int flags);
/* Checkpoints that are beginnings of ids[0..n), in no order: at most `most` into out, each with one more user. Returns
 * how many there are. */
int st_cache_beginnings(st_cache *c, const int32_t *ids, int n, st_checkpoint **out, int most);
/* The i-th of all, in no order; NULL behind the last. */
const st_checkpoint *st_cache_at(const st_cache *c, int i);
/* Drop the least worthy checkpoint, so that its blocks may return to the pool. 0 when there was none. */
int st_cache_shrink(st_cache *c, const st_session *any);

int st_cache_count(const st_cache *c);
size_t st_cache_bytes(const st_cache *c);

#endif
