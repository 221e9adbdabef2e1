/* The line protocol, from the daemon's side to ours: one table of commands, one of request keys.
 * Answers are written where they arise (engine.c); their forms are in man/strata-engine.8. */
#ifndef ST_PROTOCOL_H
#define ST_PROTOCOL_H

#include "strata.h"

#define ST_PROTOCOL_VERSION 1

typedef enum st_command {
    ST_CMD_GEN,
    ST_CMD_STOP,
    ST_CMD_STAT,
    ST_CMD_QUIT,
} st_command;

/* One GEN line, parsed. ids and bias arrays belong to the request: st_request_free. */
typedef struct st_request {
    int max_new;
    st_sampling sampling;
    int logprobs; /* -1: none; else alternatives per token */
    int keep;     /* ckpt: keep the session afterwards */
    int pin;
    int out_from; /* where output begins among ids; -1: behind them */
    int32_t *ids;
    int n_ids;
    int32_t *bias_ids;
    float *bias;
} st_request;

/* Parse one line (no newline). Returns the command or -1 with err (bad_command, bad_key, bad_ids, bad_max_new,
 * token_range, no_memory). GEN fills *req, which must be zeroed before. */
ST_API int st_parse_line(const char *line, int n_vocab, st_request *req, st_error *err);
ST_API void st_request_free(st_request *req);

#endif
