#include "pool.h"

#include <stdlib.h>
#include <string.h>

/* Stands before the bytes; 64 bytes, so that they stay aligned. */
typedef struct header {
    int users;
    struct header *next; /* in the free list */
    char pad[64 - 2 * sizeof(void *)];
} header;

struct st_pool {
    size_t bytes;
    int used, limit;
    header *idle; /* given back, kept for the next */
};

static header *head_of(const uint8_t *block) { return (header *)(void *)(block - sizeof(header)); }

st_pool *st_pool_new(size_t bytes, int limit) {
    st_pool *p = calloc(1, sizeof *p);
    if (!p) return NULL;
    p->bytes = (bytes + 63) & ~(size_t)63;
    p->limit = limit;
    return p;
}

void st_pool_free(st_pool *p) {
    if (!p) return;
    while (p->idle) {
        header *h = p->idle;
        p->idle = h->next;
        free(h);
    }
    free(p);
}

size_t st_pool_block_bytes(const st_pool *p) { return p->bytes; }
int st_pool_used(const st_pool *p) { return p->used; }
int st_pool_limit(const st_pool *p) { return p->limit; }
int st_pool_users(const uint8_t *block) { return head_of(block)->users; }
void st_pool_share(uint8_t *block) { head_of(block)->users++; }

uint8_t *st_pool_take(st_pool *p) {
    header *h = p->idle;
    if (p->used >= p->limit) return NULL;
    if (h) p->idle = h->next;
    else if (posix_memalign((void **)&h, 64, sizeof *h + p->bytes)) return NULL;
    h->users = 1;
    p->used++;
    uint8_t *block = (uint8_t *)(h + 1);
    memset(block, 0, p->bytes);
    return block;
}

void st_pool_give(st_pool *p, uint8_t *block) {
    header *h = head_of(block);
    if (--h->users) return;
    h->next = p->idle;
    p->idle = h;
    p->used--;
}
