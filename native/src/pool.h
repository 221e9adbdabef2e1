/* Blocks of 64 positions of keys and values, counted by their users: sessions and checkpoints share what is equal.
 * Only the scheduler's thread takes and gives; kernels read and write the bytes. */
#ifndef ST_POOL_H
#define ST_POOL_H

#include "strata.h"

typedef struct st_pool st_pool;

/* Blocks of `bytes` bytes, at most `limit` at a time. Memory is taken as it is needed. */
st_pool *st_pool_new(size_t bytes, int limit);
void st_pool_free(st_pool *p);
size_t st_pool_block_bytes(const st_pool *p);
int st_pool_used(const st_pool *p);
int st_pool_limit(const st_pool *p);

/* A zeroed block with one user; NULL when the limit (or memory) is reached. */
uint8_t *st_pool_take(st_pool *p);
/* One more user, one fewer: the last one gives the block back. */
void st_pool_share(uint8_t *block);
void st_pool_give(st_pool *p, uint8_t *block);
/* Users of a block. */
int st_pool_users(const uint8_t *block);

#endif
