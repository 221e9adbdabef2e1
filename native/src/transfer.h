/* Transfers: conversations on their way out of slots and into them (native/IMAGES.md). Everything here runs on the
 * scheduler's thread, between windows; bytes move on the bulk thread (bulk.h). */
#ifndef ST_TRANSFER_H
#define ST_TRANSFER_H

#include "slot.h"

typedef struct st_transfers st_transfers;

/* What transfers take from and put into. */
typedef struct st_holdings {
    st_model *m;
    st_slot *slots; /* n_slots that have a number, then the hidden one */
    int n_slots, n_all;
    st_pool *pool, *draft_pool;
    st_cache *cache;
} st_holdings;

/* Over the bulk socket `fd`; -1: none, then every transfer is refused. identity: 32 hexadecimal digits. Errors: usage,
 * no_memory. */
int st_transfers_new(int fd, const st_holdings *h, const char *identity, st_transfers **out, st_error *err);
/* The end of all that run, said; then of everything. */
void st_transfers_stop(st_transfers *all);
void st_transfers_free(st_transfers *all); /* NULL is fine */

/* A parsed PARK, WANT, RESTORE or XSTOP (takes the request's bits); one that could not be parsed. */
void st_transfers_order(st_transfers *all, int command, st_request *req);
void st_transfers_refuse(st_transfers *all, const st_request *req, const st_error *err);

/* Readable when something has come; -1 without a socket. Then hear it. */
int st_transfers_wake_fd(const st_transfers *all);
void st_transfers_hear(st_transfers *all);

/* What runs cannot go on for want of blocks: the youngest transfer gives its up. 0 when there is none. */
int st_transfers_give_way(st_transfers *all);

/* The object of STAT. */
void st_transfers_say(const st_transfers *all);

#endif
