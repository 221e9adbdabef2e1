/* Lines from stdin and the waits between windows. Nothing here ever holds a window up. */
#ifndef ST_INPUT_H
#define ST_INPUT_H

#include <stddef.h>

typedef struct st_input {
    void (*line)(void *arg, const char *line);        /* one complete line */
    void (*refused)(void *arg, const char *why);      /* one that cannot be taken */
    void (*woken)(void *arg);                         /* `wake` is readable */
    void *arg;
    int wake;    /* another descriptor to wait for; -1: none */
    int quit;    /* take no more input: QUIT, or its end */
    int leave;   /* end at the next window: told so by a signal, or the reader has gone */
    int signals; /* descriptor that is readable when a signal has come */
    char *buffer;
    size_t have, room, scanned;
    int skipping; /* inside a line that was too long */
} st_input;

/* Catch SIGTERM and SIGINT. -1 (errno) when that is impossible. */
int st_input_open(st_input *in);
void st_input_close(st_input *in);
/* Hand over what was said and hear what came, without waiting; but a reader that is far behind is waited for. */
void st_input_between_windows(st_input *in);
/* Wait for something to happen. */
void st_input_wait(st_input *in);
/* The last lines. After QUIT the reader has all the time it wants; after a signal only a moment. */
void st_input_goodbye(st_input *in);

#endif
