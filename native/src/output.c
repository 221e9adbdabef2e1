#include "output.h"

#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char *buffer;
static size_t used, sent, room;
static int gone;

static void append(const char *fmt, va_list args) {
    for (;;) {
        va_list copy;
        va_copy(copy, args);
        int n = vsnprintf(buffer ? buffer + used : NULL, room - used, fmt, copy);
        va_end(copy);
        if (n < 0) return;
        if (used + (size_t)n < room) {
            used += (size_t)n;
            return;
        }
        size_t larger = (room + (size_t)n) * 2 + 4096;
        char *p = realloc(buffer, larger);
        if (!p) {
            gone = 1; /* cannot speak any more: the caller ends as if the reader had left */
            return;
        }
        buffer = p;
        room = larger;
    }
}

void st_out_part(const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    append(fmt, args);
    va_end(args);
}

void st_out_line(const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    append(fmt, args);
    va_end(args);
    st_out_part("\n");
}

size_t st_out_pending(void) { return used - sent; }

/* A pipe that polls writable takes at least PIPE_BUF bytes without blocking. */
static int write_some(int timeout) {
    struct pollfd p = {.fd = STDOUT_FILENO, .events = POLLOUT};
    int ready = poll(&p, 1, timeout);
    if (ready < 0) return errno == EINTR ? 0 : -1;
    if (!ready) return 0;
    size_t n = used - sent < PIPE_BUF ? used - sent : PIPE_BUF;
    ssize_t w = write(STDOUT_FILENO, buffer + sent, n);
    if (w < 0) return errno == EINTR || errno == EAGAIN ? 0 : -1;
    sent += (size_t)w;
    if (sent == used) sent = used = 0;
    return w > 0;
}

int st_out_flush(void) {
    for (int w = 1; w > 0 && !gone && used > sent;)
        if ((w = write_some(0)) < 0) gone = 1;
    if (sent > 1 << 20) { /* move the rest to the front now and then */
        memmove(buffer, buffer + sent, used - sent);
        used -= sent;
        sent = 0;
    }
    return gone ? -1 : 0;
}

int st_out_drain(void) {
    while (!gone && used > sent)
        if (write_some(-1) < 0) gone = 1;
    return gone ? -1 : 0;
}
