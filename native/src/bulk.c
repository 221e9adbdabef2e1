#include "bulk.h"

#include "errors.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

enum { FRAME = 64, VERSION = 1, MANIFEST = 1, ENTRY = 2, ACKNOWLEDGEMENT = 3 };
enum { MOST_ACKS = 64, MOST_DESCRIPTORS = 4, CHUNK = 256 << 10, NICE = 5 };
enum { SEALS = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE };
enum { ORDER_WANT = 1, ORDER_DROP = 2 };
#define NO_NUMBER 0xffffffffu
static const uint8_t MAGIC[4] = {'S', 'F', 'R', 'M'};

/* Where a task stands. What is sent: its entries are summed up, the manifest waits for its turn, the daemon chooses,
 * entries go out. What is received: the manifest is awaited, the scheduler makes room, entries come in. */
enum { SUM, SHOW, ASK, SEND, AWAIT, CHOOSE, TAKE, OVER };

typedef struct frame {
    uint8_t bytes[FRAME];
    int fd; /* -1: none */
} frame;

/* A frame as it was read. */
typedef struct message {
    int type;
    uint64_t x, size;
    uint32_t number;
    int fds[MOST_DESCRIPTORS], n_fds;
} message;

struct st_bulk {
    int fd, to_thread, to_scheduler;
    pthread_t thread;
    int started;
    pthread_mutex_t lock;
    pthread_cond_t dropped;
    st_task *begun; /* under the lock, as is: */
    int stop;
    atomic_uint_fast64_t bytes, stray;
    /* the thread's */
    st_task *tasks;
    int closed, unacknowledged, n_acks, n_early;
    frame held; /* the socket took it not yet; its task */
    st_task *holder;
    frame acks[MOST_ACKS + ST_BULK_WINDOW]; /* those of early manifests come on top */
    message early[ST_BULK_WINDOW];
    uint8_t *scratch;
    size_t scratch_bytes;
};

/* ---- small things --------------------------------------------------------------------------------------------- */

static void ring(int fd) {
    uint64_t one = 1;
    while (write(fd, &one, sizeof one) < 0 && errno == EINTR) {}
}

static void silence(int fd) {
    uint64_t n;
    while (read(fd, &n, sizeof n) < 0 && errno == EINTR) {}
}

static void say(st_bulk *b, st_task *t, int what) {
    pthread_mutex_lock(&b->lock);
    t->said |= what;
    pthread_mutex_unlock(&b->lock);
    ring(b->to_scheduler);
}

static void close_all(message *m) {
    for (int i = 0; i < m->n_fds; i++) close(m->fds[i]);
    m->n_fds = 0;
}

/* The task is over: its frames no longer count. */
static void end(st_bulk *b, st_task *t) {
    b->unacknowledged -= t->n_out;
    t->n_out = 0;
    t->stage = OVER;
    if (b->holder != t) return;
    if (b->held.fd >= 0) close(b->held.fd);
    b->holder = NULL;
}

static void fail(st_bulk *b, st_task *t, const st_error *err) {
    end(b, t);
    pthread_mutex_lock(&b->lock);
    t->err = *err;
    pthread_mutex_unlock(&b->lock);
    say(b, t, ST_BULK_FAILED);
}

__attribute__((format(printf, 4, 5))) static void fail_as(st_bulk *b, st_task *t, const char *name, const char *fmt, ...) {
    st_error err;
    va_list args;
    va_start(args, fmt);
    st_vfail(&err, name, fmt, args);
    va_end(args);
    fail(b, t, &err);
}

static uint8_t *scratch(st_bulk *b, size_t bytes) {
    if (bytes <= b->scratch_bytes) return b->scratch;
    uint8_t *p = realloc(b->scratch, bytes);
    if (!p) return NULL;
    b->scratch = p;
    b->scratch_bytes = bytes;
    return p;
}

/* ---- frames out ----------------------------------------------------------------------------------------------- */

static frame frame_of(int type, uint64_t x, uint32_t number, uint64_t size, int fd) {
    frame f = {.fd = fd};
    uint16_t head[2] = {VERSION, (uint16_t)type};
    memcpy(f.bytes, MAGIC, 4);
    memcpy(f.bytes + 4, head, 4);
    memcpy(f.bytes + 8, &x, 8);
    memcpy(f.bytes + 16, &number, 4);
    memcpy(f.bytes + 24, &size, 8);
    return f;
}

/* The socket has the other end's end. */
static void hang_up(st_bulk *b) {
    b->closed = 1;
    for (st_task *t = b->tasks; t; t = t->following)
        if (t->stage != OVER) fail_as(b, t, "no_bulk", "the bulk socket was closed");
    for (int i = 0; i < b->n_early; i++) close_all(&b->early[i]);
    b->n_early = b->n_acks = 0;
}

/* 1: gone; 0: no room now, or nobody there; -1: the system cannot carry it. */
static int put_frame(st_bulk *b, const frame *f) {
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control = {.bytes = {0}};
    struct iovec io = {(void *)f->bytes, FRAME};
    struct msghdr m = {.msg_iov = &io, .msg_iovlen = 1};
    if (f->fd >= 0) {
        m.msg_control = control.bytes;
        m.msg_controllen = sizeof control.bytes;
        struct cmsghdr *c = CMSG_FIRSTHDR(&m);
        *c = (struct cmsghdr){.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof(int))};
        memcpy(CMSG_DATA(c), &f->fd, sizeof(int));
    }
    ssize_t n;
    while ((n = sendmsg(b->fd, &m, MSG_NOSIGNAL | MSG_DONTWAIT)) < 0 && errno == EINTR) {}
    if (n >= 0) return 1;
    if (f->fd >= 0 && (errno == ENOBUFS || errno == ENOMEM || errno == ETOOMANYREFS)) return -1;
    if (errno != EAGAIN && errno != EWOULDBLOCK) hang_up(b);
    return 0;
}

/* What waits for the socket: acknowledgements first. Returns whether all has gone. */
static int flush(st_bulk *b) {
    int n = 0;
    while (n < b->n_acks && put_frame(b, &b->acks[n]) > 0) n++;
    if (b->closed) return 0;
    memmove(b->acks, b->acks + n, (size_t)(b->n_acks - n) * sizeof *b->acks);
    b->n_acks -= n;
    if (b->n_acks) return 0;
    if (!b->holder) return 1;
    int gone = put_frame(b, &b->held);
    if (gone < 0) fail_as(b, b->holder, "no_memory", "the bulk socket cannot carry a descriptor: %s", strerror(errno));
    if (gone <= 0) return gone < 0;
    close(b->held.fd);
    b->holder = NULL;
    return 1;
}

static void acknowledge(st_bulk *b, const message *m) {
    b->acks[b->n_acks++] = frame_of(ACKNOWLEDGEMENT, m->x, m->number, 0, -1); /* nothing is read while they are many */
    (void)flush(b);
}

/* ---- what is sent --------------------------------------------------------------------------------------------- */

typedef struct sink {
    uint32_t crc;
    int fd; /* -1: only the checksum */
} sink;

static int write_all(int fd, const uint8_t *p, size_t n) {
    while (n) {
        ssize_t w = write(fd, p, n);
        if (w < 0 && errno == EINTR) continue;
        if (w <= 0) return -1;
        p += w;
        n -= (size_t)w;
    }
    return 0;
}

/* An entry's bytes: into the sink's descriptor, or its checksum. */
static int pour(st_bulk *b, const st_image *image, const st_image_entry *e, sink *to) {
    st_piece piece[ST_IMAGE_PIECES];
    uint8_t *room = scratch(b, st_block_bytes(&image->shape));
    int n = room ? st_image_pieces(image, e, piece) : 0;
    if (!n) errno = ENOMEM;
    for (int i = 0; i < n; i++) {
        const uint8_t *p = st_piece_bytes(image, &piece[i], room);
        if (to->fd < 0) to->crc = st_crc32c(to->crc, p, piece[i].bytes);
        else if (write_all(to->fd, p, piece[i].bytes)) return -1;
    }
    return n ? 0 : -1;
}

/* A sealed memfd for a frame; -1 (errno). */
static int sealed(int fd) {
    if (fcntl(fd, F_ADD_SEALS, SEALS) == 0) return fd;
    close(fd);
    return -1;
}

static int payload_of_manifest(const st_manifest *m) {
    size_t size = st_manifest_bytes(m);
    uint8_t *bytes = malloc(size);
    int fd = bytes ? memfd_create("strata-manifest", MFD_CLOEXEC | MFD_ALLOW_SEALING) : -1;
    if (fd >= 0) {
        st_manifest_write(m, bytes);
        if (write_all(fd, bytes, size)) close(fd), fd = -1;
        else fd = sealed(fd);
    }
    free(bytes);
    return fd;
}

static int payload_of_entry(st_bulk *b, const st_image *image, const st_image_entry *e) {
    sink to = {.fd = memfd_create("strata-entry", MFD_CLOEXEC | MFD_ALLOW_SEALING)};
    if (to.fd < 0) return -1;
    if (!pour(b, image, e, &to)) return sealed(to.fd);
    int why = errno;
    close(to.fd);
    errno = why;
    return -1;
}

static void send_payload(st_bulk *b, st_task *t, int type, uint32_t number, uint64_t size, int fd) {
    if (fd < 0) {
        fail_as(b, t, "no_memory", "no memory for %llu bytes of an image: %s", (unsigned long long)size, strerror(errno));
        return;
    }
    t->out[t->n_out++] = number;
    b->unacknowledged++;
    b->held = frame_of(type, t->x, number, size, fd);
    b->holder = t;
    if (type == ENTRY) atomic_fetch_add(&b->bytes, size);
    (void)flush(b);
}

/* The next entry's checksum; the list of entries before the first. */
static int sum(st_bulk *b, st_task *t) {
    st_error err;
    if (!t->manifest) {
        int positions[2] = {0}, flags[2] = {0}, *lists = t->image.n_points > 2 ? malloc(2 * (size_t)t->image.n_points * sizeof *lists) : NULL;
        int *at = lists ? lists : positions, *flag = lists ? lists + t->image.n_points : flags, n = lists || t->image.n_points <= 2 ? t->image.n_points : 0;
        for (int i = 0; i < n; i++) at[i] = t->image.points[i].n, flag[i] = t->image.points[i].flags;
        if (st_manifest_make(t->expected->identity, t->ids, t->n, t->drafted, &t->expected->sizes, at, flag, n, &t->manifest, &err)) fail(b, t, &err);
        free(lists);
        return 1;
    }
    sink to = {.fd = -1};
    if (t->next == t->manifest->n_entries) t->stage = SHOW;
    else if (pour(b, &t->image, &t->manifest->entries[t->next], &to)) fail_as(b, t, "no_memory", "no memory for a checksum");
    else t->manifest->entries[t->next++].crc = to.crc;
    return 1;
}

static int show(st_bulk *b, st_task *t) {
    if (b->unacknowledged >= ST_BULK_WINDOW || b->holder) return 0;
    t->stage = ASK;
    send_payload(b, t, MANIFEST, NO_NUMBER, st_manifest_bytes(t->manifest), payload_of_manifest(t->manifest));
    return 1;
}

/* The daemon has chosen: `bits`. */
static void choose(st_bulk *b, st_task *t) {
    int n = t->manifest->n_entries;
    t->wanted = calloc((size_t)n + 1, 1);
    if (!t->wanted) {
        fail_as(b, t, "no_memory", "no memory for a list of %d entries", n);
        return;
    }
    for (int i = 0; i < 8 * t->n_bits; i++) {
        if (!(t->bits[i / 8] & (1u << i % 8))) continue;
        if (i >= n) {
            fail_as(b, t, "bad_transfer", "WANT names entry %d of %d", i, n);
            return;
        }
        t->wanted[i] = 1;
    }
    t->next = 0;
    t->stage = SEND;
}

static int send_next(st_bulk *b, st_task *t) {
    int n = t->manifest->n_entries;
    while (t->next < n && !t->wanted[t->next]) t->next++;
    if (t->next == n) {
        if (t->n_out) return 0;
        end(b, t);
        say(b, t, ST_BULK_DONE);
        return 1;
    }
    if (b->unacknowledged >= ST_BULK_WINDOW || b->holder) return 0;
    const st_image_entry *e = &t->manifest->entries[t->next];
    send_payload(b, t, ENTRY, (uint32_t)t->next, e->bytes, payload_of_entry(b, &t->image, e));
    t->next++;
    return 1;
}

static void take_acknowledgement(st_bulk *b, st_task *t, const message *m) {
    int i = 0;
    while (i < t->n_out && t->out[i] != m->number) i++;
    if (i == t->n_out) {
        fail_as(b, t, "bad_image", "a frame acknowledges number %u, which is not under way", m->number);
        return;
    }
    t->out[i] = t->out[--t->n_out];
    b->unacknowledged--;
}

/* ---- what is received ----------------------------------------------------------------------------------------- */

/* What a frame carries must be what it says, and stay so. */
static int check_payload(const message *m, st_error *err) {
    struct stat s;
    if (m->n_fds != 1) return st_fail(err, "bad_image", "a frame with a payload carries one descriptor, not %d", m->n_fds);
    int seals = fcntl(m->fds[0], F_GET_SEALS);
    if (seals < 0 || fstat(m->fds[0], &s)) return st_fail(err, "bad_image", "the payload of entry %d is no memfd", (int)m->number);
    if ((seals & SEALS) != SEALS)
        return st_fail(err, "bad_image", "the payload of entry %d is not sealed against shrinking, growing and writing", (int)m->number);
    if (s.st_size < 0 || (uint64_t)s.st_size != m->size)
        return st_fail(err, "bad_image", "the payload of entry %d has %lld bytes, not the %llu that its frame says", (int)m->number, (long long)s.st_size,
                       (unsigned long long)m->size);
    return 0;
}

static int read_all(int fd, uint8_t *p, size_t n, uint64_t at) {
    while (n) {
        ssize_t r = pread(fd, p, n, (off_t)at);
        if (r < 0 && errno == EINTR) continue;
        if (r <= 0) return -1;
        p += r;
        at += (uint64_t)r;
        n -= (size_t)r;
    }
    return 0;
}

static int read_manifest(const message *m, st_manifest **out, st_error *err) {
    if (m->size > ST_MANIFEST_MOST) return st_fail(err, "bad_image", "a manifest cannot have %llu bytes", (unsigned long long)m->size);
    uint8_t *bytes = malloc((size_t)m->size + 1);
    if (!bytes) return st_fail(err, "no_memory", "no memory for a manifest of %llu bytes", (unsigned long long)m->size);
    int failed = read_all(m->fds[0], bytes, (size_t)m->size, 0) ? st_fail(err, "bad_image", "the manifest cannot be read: %s", strerror(errno))
                                                               : st_manifest_read(bytes, (size_t)m->size, out, err);
    free(bytes);
    return failed;
}

/* Everything that can be checked before there is room: the manifest, and whether p tokens can be had of it. */
static int check_manifest(st_task *t, const message *m, const st_shape *shape, st_error *err) {
    const st_expected *want = t->expected;
    if (check_payload(m, err) || read_manifest(m, &t->manifest, err)) return -1;
    if (memcmp(t->manifest->identity, want->identity, sizeof want->identity))
        return st_fail(err, "identity", "the image belongs to another model, arithmetic or type of keys and values");
    if (st_manifest_fits(t->manifest, &want->sizes, want->n_vocab, err)) return -1;
    if (t->p > shape->max_context) return st_fail(err, "no_position", "%d tokens are more than the context of %d", t->p, shape->max_context);
    t->use = malloc((size_t)t->manifest->n_entries + 1);
    t->wanted = calloc((size_t)t->manifest->n_entries + 1, 1);
    if (!t->use || !t->wanted) return st_fail(err, "no_memory", "no memory for a list of %d entries", t->manifest->n_entries);
    if (st_manifest_choose(t->manifest, &want->sizes, t->p, t->use, err)) return -1;
    if (st_session_new(shape, t->pool, t->draft_pool, &t->fresh, err)) return -1;
    memcpy(t->fresh->ids, t->manifest->ids, (size_t)t->p * sizeof *t->fresh->ids);
    return 0;
}

static void take_manifest(st_bulk *b, st_task *t, const message *m) {
    st_error err;
    if (check_manifest(t, m, &t->image.shape, &err)) {
        fail(b, t, &err);
        return;
    }
    t->stage = CHOOSE;
    acknowledge(b, m);
    if (t->stage != OVER) say(b, t, ST_BULK_MANIFEST);
}

/* A payload into its pieces; the checksum of all of it. */
static int fill(st_bulk *b, const st_image *image, const st_image_entry *e, int fd, uint32_t *crc) {
    st_piece piece[ST_IMAGE_PIECES];
    uint64_t at = 0;
    uint8_t *room = scratch(b, CHUNK);
    int n = st_image_pieces(image, e, piece);
    *crc = 0;
    if (!room) return -1;
    for (int i = 0; i < n; i++)
        for (size_t done = 0, step; done < piece[i].bytes; done += step, at += step) { /* read and summed while it is near */
            step = piece[i].bytes - done < CHUNK ? piece[i].bytes - done : CHUNK;
            uint8_t *to = piece[i].at ? piece[i].at + done : room;
            if (read_all(fd, to, step, at)) return -1;
            *crc = st_crc32c(*crc, to, step);
        }
    return 0;
}

static int check_entry(st_bulk *b, st_task *t, const message *m, st_error *err) {
    uint32_t crc, n = (uint32_t)t->manifest->n_entries, i = m->number;
    if (i >= n || !t->wanted[i]) return st_fail(err, "bad_image", "entry %d of %u was not wanted", (int)i, n);
    if (t->wanted[i] > 1) return st_fail(err, "bad_image", "entry %u comes twice", i);
    const st_image_entry *e = &t->manifest->entries[i];
    if (check_payload(m, err)) return -1;
    if (m->size != e->bytes)
        return st_fail(err, "bad_image", "entry %u comes with %llu bytes; the manifest says %llu", i, (unsigned long long)m->size, (unsigned long long)e->bytes);
    if (fill(b, &t->image, e, m->fds[0], &crc)) return st_fail(err, "bad_image", "entry %u cannot be read: %s", i, strerror(errno));
    if (crc != e->crc) return st_fail(err, "bad_image", "the checksum of entry %u is wrong", i);
    return 0;
}

static void take_entry(st_bulk *b, st_task *t, const message *m) {
    st_error err;
    if (check_entry(b, t, m, &err)) {
        fail(b, t, &err);
        return;
    }
    t->wanted[m->number] = 2;
    atomic_fetch_add(&b->bytes, m->size);
    acknowledge(b, m);
    if (t->stage == OVER || --t->left) return;
    end(b, t);
    say(b, t, ST_BULK_DONE);
}

/* The scheduler has made room: what is not there yet will come. */
static void expect(st_bulk *b, st_task *t) {
    t->left = 0;
    for (int i = 0; i < t->manifest->n_entries; i++) t->left += t->wanted[i];
    t->stage = TAKE;
    if (t->left) return;
    end(b, t);
    say(b, t, ST_BULK_DONE);
}

/* ---- orders --------------------------------------------------------------------------------------------------- */

static int is_early(st_bulk *b, st_task *t) {
    for (int i = 0; i < b->n_early; i++) {
        message m = b->early[i];
        if (m.x != t->x) continue;
        memmove(b->early + i, b->early + i + 1, (size_t)(--b->n_early - i) * sizeof *b->early);
        take_manifest(b, t, &m);
        close_all(&m);
        return 1;
    }
    return 0;
}

static void start(st_bulk *b, st_task *t) {
    t->stage = t->sends ? SUM : AWAIT;
    if (b->closed) fail_as(b, t, "no_bulk", "the bulk socket was closed");
    else if (!t->sends) (void)is_early(b, t);
}

/* Take the list of new tasks, and unlink those that are dropped. Returns the latter; *fresh: the first new one. */
static st_task *collect(st_bulk *b, st_task **fresh) {
    st_task *dropped = NULL, **at;
    for (at = &b->tasks; *at; at = &(*at)->following) {}
    *fresh = *at = b->begun;
    b->begun = NULL;
    for (at = &b->tasks; *at;) {
        st_task *t = *at;
        if (t == *fresh && t->ordered & ORDER_DROP) *fresh = t->following;
        if (!(t->ordered & ORDER_DROP)) {
            at = &t->following;
            continue;
        }
        *at = t->following;
        t->following = dropped;
        dropped = t;
    }
    return dropped;
}

/* Hear the scheduler. Returns whether to go on. */
static int take_orders(st_bulk *b) {
    st_task *fresh, *dropped, *next;
    pthread_mutex_lock(&b->lock);
    int stop = b->stop;
    dropped = collect(b, &fresh);
    pthread_mutex_unlock(&b->lock);
    for (st_task *t = dropped; t; t = next) {
        next = t->following; /* once it is said, the task is no longer ours */
        end(b, t);
        pthread_mutex_lock(&b->lock);
        t->dropped = 1;
        t->said |= ST_BULK_DROPPED;
        pthread_cond_broadcast(&b->dropped);
        pthread_mutex_unlock(&b->lock);
        ring(b->to_scheduler);
    }
    for (st_task *t = fresh; t; t = t->following) start(b, t);
    for (st_task *t = b->tasks; t; t = t->following) {
        pthread_mutex_lock(&b->lock);
        int want = t->ordered & ORDER_WANT;
        t->ordered &= ~ORDER_WANT;
        pthread_mutex_unlock(&b->lock);
        if (!want || t->stage == OVER) continue;
        if (t->stage == ASK) choose(b, t);
        else if (t->stage == CHOOSE) expect(b, t);
        else fail_as(b, t, "bad_transfer", "WANT does not fit where the transfer stands");
    }
    return !stop;
}

/* ---- frames in ------------------------------------------------------------------------------------------------ */

static st_task *find(st_bulk *b, uint64_t x) {
    for (st_task *t = b->tasks; t; t = t->following)
        if (t->x == x && t->stage != OVER) return t;
    return NULL;
}

/* A manifest ahead of its RESTORE line; the oldest makes room, nobody can have that many on the way. */
static void keep_early(st_bulk *b, message *m) {
    if (b->n_early == ST_BULK_WINDOW) {
        close_all(&b->early[0]);
        memmove(b->early, b->early + 1, (size_t)--b->n_early * sizeof *b->early);
        atomic_fetch_add(&b->stray, 1);
    }
    b->early[b->n_early++] = *m;
    m->n_fds = 0;
}

static void deliver(st_bulk *b, message *m) {
    st_task *t = find(b, m->x);
    if (!t && m->type == MANIFEST && m->n_fds == 1) keep_early(b, m);
    else if (!t) atomic_fetch_add(&b->stray, 1);
    else if (t->sends != (m->type == ACKNOWLEDGEMENT)) fail_as(b, t, "bad_image", "a frame goes the wrong way for this transfer");
    else if (m->type == ACKNOWLEDGEMENT) take_acknowledgement(b, t, m);
    else if (m->type == MANIFEST && t->stage == AWAIT) take_manifest(b, t, m);
    else if (m->type == ENTRY && t->stage == TAKE) take_entry(b, t, m);
    else fail_as(b, t, "bad_image", m->type == MANIFEST ? "a second manifest" : "an entry comes before it is wanted");
}

static int is_zero(const uint8_t *p, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (p[i]) return 0;
    return 1;
}

/* The fields of a frame; -1 when it is none. */
static int parse(const uint8_t *p, message *m) {
    uint16_t version, type;
    memcpy(&version, p + 4, 2);
    memcpy(&type, p + 6, 2);
    memcpy(&m->x, p + 8, 8);
    memcpy(&m->number, p + 16, 4);
    memcpy(&m->size, p + 24, 8);
    m->type = type;
    if (memcmp(p, MAGIC, 4) || version != VERSION || type < MANIFEST || type > ACKNOWLEDGEMENT || !is_zero(p + 20, 4) || !is_zero(p + 32, 32)) return -1;
    if (type == MANIFEST && m->number != NO_NUMBER) return -1;
    return type == ACKNOWLEDGEMENT && (m->size || m->n_fds) ? -1 : 0;
}

static void take_descriptors(struct msghdr *h, message *m) {
    for (struct cmsghdr *c = CMSG_FIRSTHDR(h); c; c = CMSG_NXTHDR(h, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
        size_t n = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < n; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof(int));
            if (m->n_fds < MOST_DESCRIPTORS) m->fds[m->n_fds++] = fd;
            else close(fd);
        }
    }
}

/* Read one frame and act on it. */
static void take_frame(st_bulk *b, int events) {
    union {
        char bytes[CMSG_SPACE(sizeof(int) * MOST_DESCRIPTORS)];
        struct cmsghdr align;
    } control;
    uint8_t bytes[FRAME] = {0};
    struct iovec io = {bytes, FRAME};
    struct msghdr h = {.msg_iov = &io, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
    message m = {0};
    ssize_t n = recvmsg(b->fd, &h, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (n < 0) {
        if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) hang_up(b);
        return;
    }
    take_descriptors(&h, &m);
    if (n == 0 && events & (POLLHUP | POLLRDHUP)) hang_up(b);
    else if (n != FRAME || h.msg_flags & MSG_TRUNC || parse(bytes, &m)) atomic_fetch_add(&b->stray, 1);
    else {
        (void)take_orders(b); /* what the scheduler said before the daemon could answer it counts already */
        deliver(b, &m);
    }
    close_all(&m);
}

/* ---- the thread ----------------------------------------------------------------------------------------------- */

static int step(st_bulk *b, st_task *t) {
    switch (t->stage) {
    case SUM: return sum(b, t);
    case SHOW: return show(b, t);
    case SEND: return send_next(b, t);
    default: return 0;
    }
}

/* One step of one task; whose turn it was goes behind the others. Returns whether there was one. */
static int work(st_bulk *b) {
    for (st_task **at = &b->tasks, *t; (t = *at); at = &t->following) {
        if (!step(b, t)) continue;
        *at = t->following;
        t->following = NULL;
        for (at = &b->tasks; *at; at = &(*at)->following) {}
        *at = t;
        return 1;
    }
    return 0;
}

static void *serve(void *arg) {
    st_bulk *b = arg;
    (void)setpriority(PRIO_PROCESS, (id_t)gettid(), NICE); /* who computes comes first */
    while (take_orders(b)) {
        int waits = !b->closed && !flush(b), worked = work(b);
        int events = (b->n_acks < MOST_ACKS ? POLLIN | POLLRDHUP : 0) | (waits ? POLLOUT : 0);
        struct pollfd p[] = {{.fd = b->to_thread, .events = POLLIN}, {.fd = b->closed ? -1 : b->fd, .events = (short)events}};
        if (poll(p, 2, worked ? 0 : -1) <= 0) continue;
        if (p[0].revents) silence(b->to_thread);
        if (p[1].revents & (POLLIN | POLLHUP | POLLRDHUP | POLLERR) && b->n_acks < MOST_ACKS) take_frame(b, p[1].revents);
    }
    return NULL;
}

/* ---- for the scheduler ---------------------------------------------------------------------------------------- */

static int check_socket(int fd, st_error *err) {
    int type = 0;
    socklen_t size = sizeof type;
    if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) || type != SOCK_SEQPACKET)
        return st_fail(err, "usage", "--bulk-fd %d is no open SOCK_SEQPACKET socket", fd);
    int flags = fcntl(fd, F_GETFL);
    if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) || fcntl(fd, F_SETFD, FD_CLOEXEC))
        return st_fail(err, "usage", "--bulk-fd %d: %s", fd, strerror(errno));
    return 0;
}

static int start_thread(st_bulk *b) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are the scheduler's */
    int failed = pthread_create(&b->thread, NULL, serve, b);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    b->started = !failed;
    return failed;
}

int st_bulk_open(int fd, st_bulk **out, st_error *err) {
    if (check_socket(fd, err)) return -1;
    st_bulk *b = calloc(1, sizeof *b);
    if (!b) return st_fail(err, "no_memory", "no memory for the bulk socket");
    b->fd = fd;
    b->to_thread = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    b->to_scheduler = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    pthread_mutex_init(&b->lock, NULL);
    pthread_cond_init(&b->dropped, NULL);
    if (b->to_thread >= 0 && b->to_scheduler >= 0 && !start_thread(b)) {
        *out = b;
        return 0;
    }
    st_bulk_close(b);
    return st_fail(err, "no_memory", "no thread for the bulk socket");
}

void st_bulk_close(st_bulk *b) {
    if (!b) return;
    pthread_mutex_lock(&b->lock);
    b->stop = 1;
    pthread_mutex_unlock(&b->lock);
    if (b->started) {
        ring(b->to_thread);
        pthread_join(b->thread, NULL);
    }
    if (b->holder && b->held.fd >= 0) close(b->held.fd);
    for (int i = 0; i < b->n_early; i++) close_all(&b->early[i]);
    close(b->fd);
    if (b->to_thread >= 0) close(b->to_thread);
    if (b->to_scheduler >= 0) close(b->to_scheduler);
    pthread_mutex_destroy(&b->lock);
    pthread_cond_destroy(&b->dropped);
    free(b->scratch);
    free(b);
}

int st_bulk_wake_fd(const st_bulk *b) { return b->to_scheduler; }
void st_bulk_hear(st_bulk *b) { silence(b->to_scheduler); }
uint64_t st_bulk_bytes(const st_bulk *b) { return atomic_load(&b->bytes); }
uint64_t st_bulk_stray(const st_bulk *b) { return atomic_load(&b->stray); }

void st_bulk_begin(st_bulk *b, st_task *t) {
    pthread_mutex_lock(&b->lock);
    st_task **at = &b->begun;
    while (*at) at = &(*at)->following;
    t->following = NULL;
    *at = t;
    pthread_mutex_unlock(&b->lock);
    ring(b->to_thread);
}

static void order(st_bulk *b, st_task *t, int what) {
    pthread_mutex_lock(&b->lock);
    t->ordered |= what;
    pthread_mutex_unlock(&b->lock);
    ring(b->to_thread);
}

void st_bulk_want(st_bulk *b, st_task *t, uint8_t *bits, int n_bits) {
    pthread_mutex_lock(&b->lock);
    t->bits = bits;
    t->n_bits = n_bits;
    pthread_mutex_unlock(&b->lock);
    order(b, t, ORDER_WANT);
}

void st_bulk_drop(st_bulk *b, st_task *t) { order(b, t, ORDER_DROP); }

void st_bulk_drop_now(st_bulk *b, st_task *t) {
    st_bulk_drop(b, t);
    pthread_mutex_lock(&b->lock);
    while (!t->dropped) pthread_cond_wait(&b->dropped, &b->lock);
    pthread_mutex_unlock(&b->lock);
}

int st_bulk_said(st_bulk *b, st_task *t) {
    pthread_mutex_lock(&b->lock);
    int said = t->said;
    t->said = 0;
    pthread_mutex_unlock(&b->lock);
    return said;
}
