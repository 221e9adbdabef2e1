#include "input.h"

#include "output.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <unistd.h>

/* MOST_PENDING: a reader this far behind is waited for after all, so memory is bounded. */
enum { MAX_LINE = 32 << 20, MOST_PENDING = 64 << 20 };

/* One line of len bytes, which its newline follows. */
static void take_line(st_input *in, char *line, size_t len) {
    if (len && line[len - 1] == '\r') len--;
    line[len] = 0;
    if (memchr(line, 0, len)) in->refused(in->arg, "a line holds a NUL byte"); /* it would cut the line */
    else in->line(in->arg, line);
}

static void take_lines(st_input *in) {
    size_t start = 0;
    for (char *nl; !in->quit && (nl = memchr(in->buffer + in->scanned, '\n', in->have - in->scanned));) {
        size_t end = (size_t)(nl - in->buffer);
        in->scanned = end + 1;
        if (in->skipping) in->skipping = 0;
        else take_line(in, in->buffer + start, end - start);
        start = end + 1;
    }
    if (start) memmove(in->buffer, in->buffer + start, in->have - start);
    in->have -= start;
    in->scanned = in->have;
    if (in->have < MAX_LINE) return;
    if (!in->skipping) in->refused(in->arg, "a line is longer than 32 MiB");
    in->skipping = 1;
    in->have = in->scanned = 0;
}

/* Read what has arrived on stdin. Its end is a QUIT; half a line before it is none. */
static void take_input(st_input *in) {
    if (in->room - in->have < 65536) {
        size_t more = in->room > (4 << 20) ? 4 << 20 : in->room + 65536;
        char *line = realloc(in->buffer, in->room + more);
        if (!line) {
            in->quit = 1;
            return;
        }
        in->buffer = line;
        in->room += more;
    }
    ssize_t n = read(STDIN_FILENO, in->buffer + in->have, in->room - in->have);
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) return;
    if (n <= 0) {
        in->quit = 1;
        return;
    }
    in->have += (size_t)n;
    take_lines(in);
}

static int reader_is_far_behind(void) { return st_out_pending() > MOST_PENDING; }

/* Wait up to `timeout` ms (-1: without end) for a signal, for input or for room in the output, and act on it. While
 * the reader is far behind no input is taken, because every answer would add to what waits. */
static void attend_to(st_input *in, int timeout) {
    struct pollfd p[] = {{.fd = in->signals, .events = POLLIN},
                         {.fd = in->quit || reader_is_far_behind() ? -1 : STDIN_FILENO, .events = POLLIN},
                         {.fd = STDOUT_FILENO, .events = st_out_pending() ? POLLOUT : 0},
                         {.fd = in->wake, .events = POLLIN}};
    if (poll(p, sizeof p / sizeof *p, timeout) <= 0) return;
    if (p[0].revents || p[2].revents & (POLLERR | POLLHUP | POLLNVAL)) in->leave = 1;
    if (p[3].revents) in->woken(in->arg);
    if (p[1].revents) take_input(in);
    if (st_out_flush()) in->leave = 1;
}

/* Hand over what was said and hear what came, without waiting; but a reader that is far behind is waited for. */
void st_input_between_windows(st_input *in) {
    if (st_out_flush()) in->leave = 1;
    attend_to(in, 0);
    while (reader_is_far_behind() && !in->leave) attend_to(in, -1);
}

/* The last lines. After QUIT the reader has all the time it wants; after a signal only a moment. */
void st_input_goodbye(st_input *in) {
    while (st_out_pending() && !in->leave) attend_to(in, -1);
    for (int i = 0; i < 10 && st_out_pending(); i++) {
        struct pollfd p = {.fd = STDOUT_FILENO, .events = POLLOUT};
        if (poll(&p, 1, 20) < 0 || st_out_flush()) return;
    }
}

void st_input_wait(st_input *in) { attend_to(in, -1); }

/* SIGTERM and SIGINT become readable on a descriptor: no moment between a check and a wait can lose them. The team's
 * threads block all signals, so they come here. */
int st_input_open(st_input *in) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    signal(SIGPIPE, SIG_IGN);
    in->signals = sigprocmask(SIG_BLOCK, &set, NULL) ? -1 : signalfd(-1, &set, SFD_CLOEXEC);
    return in->signals < 0 ? -1 : 0;
}

void st_input_close(st_input *in) {
    free(in->buffer);
    if (in->signals >= 0) close(in->signals);
}
