#include "engine.h"

#include "arith.h"
#include "errors.h"
#include "output.h"
#include "protocol.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <time.h>
#include <unistd.h>

/* MOST_PENDING: a reader this far behind is waited for after all, so memory is bounded. */
enum { MAX_LINE = 32 << 20, MAX_STOP_IDS = 16, MOST_PENDING = 64 << 20 };

typedef enum phase { IDLE, READING, DECODING } phase;
static const char *const PHASES[] = {"idle", "reading", "decoding"};

typedef struct engine {
    st_model *m;
    const st_options *o;
    st_session *session;
    st_sampler *sampler;
    st_penalty *penalty;
    float *logits;
    int32_t stop_ids[MAX_STOP_IDS];
    int n_stop_ids;
    int stop;    /* end the running request at the next window */
    int quit;    /* take no more input; exit when the running request is done */
    int leave;   /* exit at the next window: told so by a signal, or the reader has gone */
    int signals; /* descriptor that is readable when a signal has come */
    phase phase;
    /* the running request */
    st_request req;
    int32_t *ids; /* prompt and output: [max_context + 1] */
    int n_ids;
    /* input */
    char *line;
    size_t have, room, scanned;
    int skipping; /* inside a line that was too long */
    /* totals */
    uint64_t requests, prompt_tokens, reused_tokens, output_tokens, windows;
    double last_prompt_tok_s, last_decode_tok_s, started;
} engine;

static double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

void st_engine_identity(const st_model *m, const char *kv, char *hex) {
    char text[256];
    uint8_t digest[16];
    int n = snprintf(text, sizeof text, "fingerprint=%s arithmetic=%d kv=%s dense=q8_0 rope=none overrides=", m->fingerprint,
                     ST_ARITH_VERSION, kv);
    st_blake2b_hash(digest, sizeof digest, text, (size_t)n, NULL, 0);
    for (int i = 0; i < 16; i++) snprintf(hex + 2 * i, 3, "%02x", digest[i]);
}

/* ---- end-of-generation tokens ------------------------------------------------------------------------------- */

static void add_stop(engine *e, int64_t id) {
    if (id < 0 || id >= e->m->n_vocab || e->n_stop_ids == MAX_STOP_IDS) return;
    for (int i = 0; i < e->n_stop_ids; i++)
        if (e->stop_ids[i] == id) return;
    e->stop_ids[e->n_stop_ids++] = (int32_t)id;
}

/* eos and eot of the file, and the two end marks of the family by their text. */
static void find_stops(engine *e) {
    static const char *const keys[] = {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"};
    static const char *const texts[] = {"<|endoftext|>", "<|im_end|>"};
    int64_t id;
    for (int i = 0; i < 2; i++)
        if (st_gguf_get_i64(e->m->gguf, keys[i], &id, NULL) == 1) add_stop(e, id);
    const st_gguf_kv *tokens = st_gguf_kv_find(e->m->gguf, "tokenizer.ggml.tokens");
    for (uint64_t i = 0; tokens && i < tokens->count; i++) {
        st_gguf_str s;
        if (st_gguf_kv_str(tokens, i, &s)) break;
        for (int t = 0; t < 2; t++)
            if (s.len == strlen(texts[t]) && !memcmp(s.ptr, texts[t], s.len)) add_stop(e, (int64_t)i);
    }
}

static int is_stop(const engine *e, int32_t id) {
    for (int i = 0; i < e->n_stop_ids; i++)
        if (e->stop_ids[i] == id) return 1;
    return 0;
}

/* ---- status ------------------------------------------------------------------------------------------------- */

static void say_stat(const engine *e) {
    st_out_part("STAT {\"engine\":\"%s\",\"phase\":\"%s\",\"isa\":\"%s\",\"threads\":%d,\"uptime_s\":%.1f,", ST_ENGINE_VERSION,
                PHASES[e->phase], e->m->kernels->isa, st_team_size(e->m->team), (now_ms() - e->started) * 1e-3);
    st_out_part("\"requests\":%llu,\"windows\":%llu,\"prompt_tokens\":%llu,\"reused_tokens\":%llu,\"output_tokens\":%llu,",
                (unsigned long long)e->requests, (unsigned long long)e->windows, (unsigned long long)e->prompt_tokens,
                (unsigned long long)e->reused_tokens, (unsigned long long)e->output_tokens);
    st_out_line("\"prompt_tok_s\":%.1f,\"decode_tok_s\":%.1f,\"session_tokens\":%d,\"session_mib\":%.1f,\"weights_mib\":%.1f}",
                e->last_prompt_tok_s, e->last_decode_tok_s, e->session->n,
                ((double)st_session_fixed_bytes(&e->m->shape) + (double)st_block_bytes(&e->m->shape) * e->session->n_blocks) / 1048576.0,
                (double)st_weights_bytes(e->m->weights) / 1048576.0);
}

static void say_error(const st_error *err) { st_out_line("ERR %s %s", err->name, err->text); }

/* ---- a request ---------------------------------------------------------------------------------------------- */

static void between_windows(engine *e);

/* Forward `n` more ids of the request; logits of the last when asked for. */
static int feed(engine *e, int n, int want, st_error *err) {
    if (st_session_reserve(e->session, e->session->n + n, err)) return -1;
    st_run run = {e->session, e->ids + e->session->n, n};
    int last = n - 1;
    st_window w = {.runs = &run, .n_runs = 1, .want = &last, .n_want = want, .logits = e->logits};
    st_model_forward(e->m, &w);
    e->windows++;
    return 0;
}

/* Read what the session does not hold yet. 0 read, 1 stopped, -1 failed. */
static int read_prompt(engine *e, double start, int reused, st_error *err) {
    e->phase = READING;
    while (e->session->n < e->n_ids) {
        between_windows(e);
        if (e->stop || e->leave) return 1;
        int left = e->n_ids - e->session->n, n = left < e->m->max_rows ? left : e->m->max_rows;
        if (feed(e, n, n == left, err)) return -1;
        double ms = now_ms() - start;
        st_out_line("PP %d %d %.1f %.1f", e->session->n, e->n_ids, ms, ms > 0 ? (e->session->n - reused) * 1e3 / ms : 0.0);
    }
    return 0;
}

static int say_token(engine *e, int32_t id, st_error *err) {
    int n = e->req.logprobs;
    if (n < 0) {
        st_out_line("T %d", id);
        return 0;
    }
    int32_t top[20];
    double lp[20], chosen;
    int got = st_logprobs(e->sampler, e->logits, id, n, &chosen, top, lp, err);
    if (got < 0) return -1;
    st_out_part("T %d lp=%.9g%s", id, chosen, got ? " top=" : "");
    for (int i = 0; i < got; i++) st_out_part("%s%d:%.9g", i ? "," : "", top[i], lp[i]);
    st_out_line("%s", "");
    return 0;
}

static int any_penalty(const st_sampling *s) {
    return (s->penalty_repeat != 1.0f && s->penalty_last_n != 0) || s->penalty_freq != 0.0f || s->penalty_present != 0.0f;
}

/* Tokens until an end; the finish word, or NULL and err. *generated counts the tokens said. */
static const char *decode(engine *e, int prompt, int *generated, st_error *err) {
    const st_sampling *sp = &e->req.sampling;
    int from = e->req.out_from >= 0 ? e->req.out_from : prompt;
    st_penalty_free(e->penalty);
    e->penalty = NULL;
    if (any_penalty(sp) && (st_penalty_new(e->m->n_vocab, sp, &e->penalty, err) || st_penalty_reset(e->penalty, e->ids, e->n_ids, from, err)))
        return NULL;
    e->phase = DECODING;
    for (*generated = 0;;) {
        int32_t id;
        if (st_sample(e->sampler, e->logits, sp, e->penalty, (uint32_t)e->n_ids, &id, err) || say_token(e, id, err)) return NULL;
        e->ids[e->n_ids++] = id;
        ++*generated;
        e->output_tokens++;
        between_windows(e);
        if (is_stop(e, id)) return "stop";
        if (e->stop || e->leave) return "cancel";
        if (*generated >= e->req.max_new || e->n_ids >= e->m->shape.max_context) return "length";
        if (e->penalty && st_penalty_push(e->penalty, e->ids, e->n_ids, err)) return NULL;
        if (feed(e, 1, 1, err)) return NULL;
    }
}

/* How many prompt tokens the held session can give: all it holds, when that is a beginning of the prompt and leaves
 * one token to read (its recurrent state cannot be cut). */
static int reusable(const engine *e, const st_request *req) {
    const st_session *s = e->session;
    if (!s->n || s->n >= req->n_ids || memcmp(s->ids, req->ids, (size_t)s->n * sizeof *s->ids)) return 0;
    return s->n;
}

/* A request ended by a failure: its state is dropped, the engine stays in step. */
static void fail_request(engine *e, const st_error *err) {
    say_error(err);
    st_session_clear(e->session);
}

static void generate(engine *e) {
    st_error err = {0};
    int prompt = e->req.n_ids, generated = 0, reused = reusable(e, &e->req);
    double start = now_ms();
    if (prompt >= e->m->shape.max_context) {
        st_fail(&err, "context_full", "prompt (%d tokens) leaves no room in the context (%d)", prompt, e->m->shape.max_context);
        say_error(&err);
        return;
    }
    memcpy(e->ids, e->req.ids, (size_t)prompt * sizeof *e->ids);
    e->n_ids = prompt;
    if (!reused) st_session_clear(e->session);
    e->requests++;
    e->reused_tokens += (uint64_t)reused;
    st_out_line("RESUME %d", reused);
    int read = read_prompt(e, start, reused, &err);
    int fresh = e->session->n - reused;
    double read_ms = now_ms() - start, decode_ms = 0;
    e->prompt_tokens += (uint64_t)fresh;
    const char *finish = "cancel";
    if (read < 0) {
        fail_request(e, &err);
        return;
    }
    if (read == 0) {
        if (read_ms > 0) e->last_prompt_tok_s = fresh * 1e3 / read_ms;
        st_out_line("REUSED %d", reused);
        finish = decode(e, prompt, &generated, &err);
        decode_ms = now_ms() - start - read_ms;
        if (!finish) {
            fail_request(e, &err);
            return;
        }
        if (generated > 1 && decode_ms > 0) e->last_decode_tok_s = (generated - 1) * 1e3 / decode_ms;
    }
    if (!e->req.keep) st_session_clear(e->session);
    st_out_line("DONE %d %d %.1f %.1f %s 0 0 %d 0 0 0 0 0 %d 0", generated, prompt, read_ms, decode_ms, finish, reused, fresh);
}

/* ---- input and output --------------------------------------------------------------------------------------- */

static int running(const engine *e) { return e->phase != IDLE || e->req.n_ids; }

/* Act on one line while idle or running. A GEN is kept in `req` and started by the main loop. */
static void handle(engine *e, const char *line) {
    st_error err = {0};
    st_request req = {0};
    if (!*line) return;
    switch (st_parse_line(line, e->m->n_vocab, &req, &err)) {
    case ST_CMD_GEN:
        if (running(e)) {
            st_fail(&err, "busy", "a request is running; one at a time");
            say_error(&err);
            break;
        }
        e->req = req;
        e->stop = 0;
        return;
    case ST_CMD_STOP: e->stop = running(e); break; /* between requests it is stale; right behind its GEN it is not */
    case ST_CMD_STAT: say_stat(e); break;
    case ST_CMD_QUIT: e->quit = 1; break;
    default: say_error(&err);
    }
    st_request_free(&req);
}

static void refuse_line(const char *why) {
    st_error err = {0};
    st_fail(&err, "bad_command", "%s", why);
    say_error(&err);
}

/* One line of len bytes, which its newline follows. */
static void take_line(engine *e, char *line, size_t len) {
    if (len && line[len - 1] == '\r') len--;
    line[len] = 0;
    if (memchr(line, 0, len)) refuse_line("a line holds a NUL byte"); /* it would cut the line */
    else handle(e, line);
}

static void take_lines(engine *e) {
    size_t start = 0;
    for (char *nl; !e->quit && (nl = memchr(e->line + e->scanned, '\n', e->have - e->scanned));) {
        size_t end = (size_t)(nl - e->line);
        e->scanned = end + 1;
        if (e->skipping) e->skipping = 0;
        else take_line(e, e->line + start, end - start);
        start = end + 1;
    }
    if (start) memmove(e->line, e->line + start, e->have - start);
    e->have -= start;
    e->scanned = e->have;
    if (e->have < MAX_LINE) return;
    if (!e->skipping) refuse_line("a line is longer than 32 MiB");
    e->skipping = 1;
    e->have = e->scanned = 0;
}

/* Read what has arrived on stdin. Its end is a QUIT; half a line before it is none. */
static void take_input(engine *e) {
    if (e->room - e->have < 65536) {
        size_t more = e->room > (4 << 20) ? 4 << 20 : e->room + 65536;
        char *line = realloc(e->line, e->room + more);
        if (!line) {
            e->quit = 1;
            return;
        }
        e->line = line;
        e->room += more;
    }
    ssize_t n = read(STDIN_FILENO, e->line + e->have, e->room - e->have);
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) return;
    if (n <= 0) {
        e->quit = 1;
        return;
    }
    e->have += (size_t)n;
    take_lines(e);
}

static int reader_is_far_behind(void) { return st_out_pending() > MOST_PENDING; }

/* Wait up to `timeout` ms (-1: without end) for a signal, for input or for room in the output, and act on it. While
 * the reader is far behind no input is taken, because every answer would add to what waits. */
static void attend_to(engine *e, int timeout) {
    struct pollfd p[] = {{.fd = e->signals, .events = POLLIN},
                         {.fd = e->quit || reader_is_far_behind() ? -1 : STDIN_FILENO, .events = POLLIN},
                         {.fd = STDOUT_FILENO, .events = st_out_pending() ? POLLOUT : 0}};
    if (poll(p, sizeof p / sizeof *p, timeout) <= 0) return;
    if (p[0].revents || p[2].revents & (POLLERR | POLLHUP | POLLNVAL)) e->leave = 1;
    if (p[1].revents) take_input(e);
    if (st_out_flush()) e->leave = 1;
}

/* Hand over what was said and hear what came, without waiting; but a reader that is far behind is waited for. */
static void between_windows(engine *e) {
    if (st_out_flush()) e->leave = 1;
    attend_to(e, 0);
    while (reader_is_far_behind() && !e->leave) attend_to(e, -1);
}

/* The last lines. After QUIT the reader has all the time it wants; after a signal only a moment. */
static void say_goodbye(engine *e) {
    while (st_out_pending() && !e->leave) attend_to(e, -1);
    for (int i = 0; i < 10 && st_out_pending(); i++) {
        struct pollfd p = {.fd = STDOUT_FILENO, .events = POLLOUT};
        if (poll(&p, 1, 20) < 0 || st_out_flush()) return;
    }
}

/* ---- start and end ------------------------------------------------------------------------------------------ */

static int engine_new(engine *e, st_model *m, const st_options *o, st_error *err) {
    *e = (engine){.m = m, .o = o, .started = now_ms(), .signals = -1};
    e->logits = malloc((size_t)m->n_vocab * sizeof *e->logits);
    e->ids = malloc(((size_t)m->shape.max_context + 1) * sizeof *e->ids);
    if (!e->logits || !e->ids) return st_fail(err, "no_memory", "no memory for logits");
    if (st_session_new(&m->shape, &e->session, err) || st_sampler_new(m->n_vocab, &e->sampler, err)) return -1;
    st_sampler_set_exp(e->sampler, m->kernels->exp_sub);
    find_stops(e);
    return 0;
}

static void engine_free(engine *e) {
    st_session_free(e->session);
    st_sampler_free(e->sampler);
    st_penalty_free(e->penalty);
    st_request_free(&e->req);
    free(e->logits);
    free(e->ids);
    free(e->line);
    if (e->signals >= 0) close(e->signals);
}

static void say_facts(const engine *e, const char *kv) {
    const st_model *m = e->m;
    char identity[33];
    st_engine_identity(m, kv, identity);
    st_out_line("INFO identity=%s fingerprint=%s isa=%s threads=%d kv=%s context=%d trained_context=%d vocab=%d", identity,
                m->fingerprint, m->kernels->isa, st_team_size(m->team), kv, m->shape.max_context, m->trained_context, m->n_vocab);
    st_out_line("INFO weights_mib=%zu session_kib_per_token=%.2f session_fixed_kib=%zu chunk=%d", st_weights_bytes(m->weights) >> 20,
                (double)st_block_bytes(&m->shape) / 64.0 / 1024.0, st_session_fixed_bytes(&m->shape) >> 10, m->max_rows);
    st_out_line("READY %d stop", m->shape.max_context);
}

/* SIGTERM and SIGINT become readable on a descriptor: no moment between a check and a wait can lose them. The team's
 * threads block all signals, so they come here. */
static int open_signals(void) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    signal(SIGPIPE, SIG_IGN);
    return sigprocmask(SIG_BLOCK, &set, NULL) ? -1 : signalfd(-1, &set, SFD_CLOEXEC);
}

static int engine_fails(engine *e, const st_error *err) {
    say_error(err);
    st_out_drain();
    engine_free(e);
    return 1;
}

int st_engine_serve(st_model *m, const st_options *o) {
    engine e;
    st_error err = {0};
    if (engine_new(&e, m, o, &err)) return engine_fails(&e, &err);
    if ((e.signals = open_signals()) < 0) {
        st_fail(&err, "internal", "no descriptor for signals: %s", strerror(errno));
        return engine_fails(&e, &err);
    }
    say_facts(&e, st_kv_name(m->shape.kv));
    while (!e.leave && (!e.quit || running(&e))) {
        if (e.req.n_ids) {
            generate(&e);
            st_request_free(&e.req);
            e.phase = IDLE;
            between_windows(&e);
        } else {
            attend_to(&e, -1);
        }
    }
    say_goodbye(&e);
    engine_free(&e);
    return 0;
}
