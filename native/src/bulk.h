/* The bulk socket: images' bytes as frames (native/IMAGES.md), on a thread of their own, so that no window waits for a
 * copy, a checksum or the daemon.
 *
 * Work is ordered by tasks. A task belongs to the scheduler's thread until it is begun and again once it is dropped; in
 * between its fields are read by the bulk thread, and the memory that its image points to stays as it is (what is sent) or
 * is the bulk thread's to write (what is received). Blocks are taken and given by the scheduler's thread alone. */
#ifndef ST_BULK_H
#define ST_BULK_H

#include "image.h"

typedef struct st_bulk st_bulk;

/* What a task has come to; bits. */
enum {
    ST_BULK_MANIFEST = 1, /* receives: the manifest has come and is good; `manifest`, `use` and `fresh` are set */
    ST_BULK_DONE = 2,     /* every wanted entry was acknowledged, or is in its place */
    ST_BULK_FAILED = 4,   /* why is in `err`; drop it */
    ST_BULK_DROPPED = 8   /* the bulk thread has done with it */
};

enum { ST_BULK_WINDOW = 8 }; /* frames without acknowledgement in one direction */

/* What is looked at when a manifest comes. */
typedef struct st_expected {
    uint8_t identity[16];
    st_image_sizes sizes;
    int n_vocab;
} st_expected;

typedef struct st_task {
    uint64_t x;
    int sends;
    const st_expected *expected;
    /* sends: ids[0..n), the drafter's rows [0, drafted), and everything of the image */
    const int32_t *ids;
    int n, drafted;
    /* receives: tokens to take; when the manifest has come `use` (st_manifest_choose) and an empty session, into which the
     * scheduler puts blocks and which the image then describes */
    int p;
    uint8_t *use;
    st_session *fresh;
    st_pool *pool, *draft_pool;

    st_image image;
    st_manifest *manifest;
    uint8_t *wanted; /* [n_entries] as told by st_bulk_want */

    /* the bulk thread's */
    int stage, next, left, n_out;
    uint32_t out[ST_BULK_WINDOW]; /* numbers sent and not acknowledged */
    int said, dropped;            /* under the lock, as are: */
    int ordered;
    uint8_t *bits;
    int n_bits;
    st_error err;
    struct st_task *following;
} st_task;

/* Serve the socket `fd` (checked, made non-blocking). Errors: usage, no_memory. */
int st_bulk_open(int fd, st_bulk **out, st_error *err);
/* The thread ends; no task is its any more. NULL is fine. */
void st_bulk_close(st_bulk *b);
/* Readable when tasks have come to something; st_bulk_hear makes it unreadable. */
int st_bulk_wake_fd(const st_bulk *b);
void st_bulk_hear(st_bulk *b);
/* Bytes of entries that were sent and received. */
uint64_t st_bulk_bytes(const st_bulk *b);
/* Frames that could not be read or were nobody's. */
uint64_t st_bulk_stray(const st_bulk *b);

void st_bulk_begin(st_bulk *b, st_task *t);
/* sends: entries that the daemon asks for (bit i mod 8 of byte i / 8; the task takes the malloced array).
 * receives: entries that will come; the image is described and `wanted` set. */
void st_bulk_want(st_bulk *b, st_task *t, uint8_t *bits, int n_bits);
/* Done with it: ST_BULK_DROPPED will be said, and nothing after it. */
void st_bulk_drop(st_bulk *b, st_task *t);
/* The same, and wait for it: as long as a copy of one entry takes. */
void st_bulk_drop_now(st_bulk *b, st_task *t);
/* What has been said of the task since the last call. */
int st_bulk_said(st_bulk *b, st_task *t);

#endif
