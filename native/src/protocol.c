#include "protocol.h"

#include "errors.h"

#include <errno.h>
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

/* ---- tables ------------------------------------------------------------------------------------------------- */

/* What follows a command, in order: x a transfer, s a slot, p a number of tokens, w a list of entries, g what GEN has. */
static const struct {
    const char *word;
    int command;
    const char *follows;
} COMMANDS[] = {{"GEN", ST_CMD_GEN, "g"},     {"STOP", ST_CMD_STOP, ""},    {"STAT", ST_CMD_STAT, ""},          {"QUIT", ST_CMD_QUIT, ""},
                {"BGEN", ST_CMD_BGEN, "sg"},  {"BSTOP", ST_CMD_BSTOP, "s"}, {"BYIELD", ST_CMD_BYIELD, "s"},     {"PARK", ST_CMD_PARK, "xs"},
                {"WANT", ST_CMD_WANT, "xw"}, {"RESTORE", ST_CMD_RESTORE, "xsp"}, {"XSTOP", ST_CMD_XSTOP, "x"}};

typedef enum kind { FLOAT, INT, U64, U32, BIAS } kind;

/* Request keys: where they go and what they may be. Keys that are not here are skipped: an older engine serves a newer
 * daemon. Sampling ranges are checked once more, together, by st_sampling_check. */
static const struct {
    const char *name;
    kind kind;
    size_t at;
    double lo, hi;
} KEYS[] = {
    {"temperature", FLOAT, offsetof(st_request, sampling.temperature), -1e9, 1e9},
    {"top_p", FLOAT, offsetof(st_request, sampling.top_p), 0, 1},
    {"top_k", INT, offsetof(st_request, sampling.top_k), 0, 2147483647},
    {"min_p", FLOAT, offsetof(st_request, sampling.min_p), 0, 1},
    {"seed", U64, offsetof(st_request, sampling.seed), 0, 0},
    {"choice", U32, offsetof(st_request, sampling.choice), 0, 4294967295.0},
    {"penalty_repeat", FLOAT, offsetof(st_request, sampling.penalty_repeat), 0.01, 100},
    {"penalty_freq", FLOAT, offsetof(st_request, sampling.penalty_freq), -100, 100},
    {"penalty_present", FLOAT, offsetof(st_request, sampling.penalty_present), -100, 100},
    {"penalty_last_n", INT, offsetof(st_request, sampling.penalty_last_n), -1, 2147483647},
    {"logit_bias", BIAS, 0, 0, 0},
    {"logprobs", INT, offsetof(st_request, logprobs), 0, 20},
    {"ckpt", INT, offsetof(st_request, keep), 0, 1},
    {"pin", INT, offsetof(st_request, pin), 0, 2147483647},
    {"out_from", INT, offsetof(st_request, out_from), 0, 2147483647},
    {"spec_min_p", FLOAT, offsetof(st_request, spec_min_p), 0, 1},
    {"spec_p_cum", FLOAT, offsetof(st_request, spec_p_cum), 0, 1},
    {"spec_p_cum_deep", FLOAT, offsetof(st_request, spec_p_cum_deep), 0, 1},
};

/* ---- words -------------------------------------------------------------------------------------------------- */

typedef struct word {
    const char *at;
    size_t n;
} word;

/* The next blank-separated word from *p; n = 0 at the end of the line. */
static word next_word(const char **p) {
    while (**p == ' ' || **p == '\t') (*p)++;
    word w = {*p, strcspn(*p, " \t")};
    *p += w.n;
    return w;
}

static int is(word w, const char *text) { return strlen(text) == w.n && !memcmp(w.at, text, w.n); }

static int shown(word w) { return (int)(w.n > 60 ? 60 : w.n); }

/* A whole word as a number; 0 when it is one. Words are copied: strtod must not run into what follows. */
static int number(word w, double *out) {
    char buf[64], *end;
    if (!w.n || w.n >= sizeof buf) return -1;
    memcpy(buf, w.at, w.n);
    buf[w.n] = 0;
    if (strspn(buf, "+-.0123456789eEinfINF") != w.n) return -1; /* no hexadecimal, no nan */
    *out = strtod(buf, &end);
    return end == buf + w.n && *out == *out ? 0 : -1;
}

/* A signed or unsigned 64-bit integer, taken modulo 2^64. */
static int seed_number(word w, uint64_t *out) {
    char buf[32], *end;
    if (!w.n || w.n >= sizeof buf) return -1;
    memcpy(buf, w.at, w.n);
    buf[w.n] = 0;
    if (strspn(buf + (*buf == '-'), "0123456789") != w.n - (*buf == '-') || (*buf == '-' && w.n == 1)) return -1;
    errno = 0;
    *out = *buf == '-' ? (uint64_t)strtoll(buf, &end, 10) : strtoull(buf, &end, 10);
    return errno ? -1 : 0;
}

/* ---- lists -------------------------------------------------------------------------------------------------- */

/* One decimal id below n_vocab from *p up to a stop character, which stays. */
static int one_id(const char **p, const char *end, int n_vocab, int32_t *out, st_error *err) {
    int64_t v = 0;
    const char *start = *p;
    while (*p < end && **p >= '0' && **p <= '9') {
        v = v * 10 + (**p - '0');
        if (v > 2147483647) break;
        (*p)++;
    }
    if (*p == start) return st_fail(err, "bad_ids", "token ids are decimal numbers with commas between them, not \"%.20s\"", start);
    if (v >= n_vocab) return st_fail(err, "token_range", "token id %lld is outside the vocabulary of %d", (long long)v, n_vocab);
    *out = (int32_t)v;
    return 0;
}

static size_t count_commas(word w) {
    size_t n = 0;
    for (size_t i = 0; i < w.n; i++) n += w.at[i] == ',';
    return n;
}

static int parse_ids(word w, int n_vocab, st_request *req, st_error *err) {
    size_t room = count_commas(w) + 1;
    const char *p = w.at, *end = w.at + w.n;
    if (!(req->ids = malloc(room * sizeof *req->ids))) return st_fail(err, "no_memory", "no memory for %zu token ids", room);
    for (;;) {
        if (one_id(&p, end, n_vocab, &req->ids[req->n_ids], err)) return -1;
        req->n_ids++;
        if (p == end) return 0;
        if (*p != ',') return st_fail(err, "bad_ids", "token ids are decimal numbers with commas between them, not \"%.20s\"", p);
        p++;
    }
}

/* logit_bias=id:bias,id:bias */
static int parse_bias(word w, int n_vocab, st_request *req, st_error *err) {
    size_t room = count_commas(w) + 1;
    const char *p = w.at, *end = w.at + w.n;
    free(req->bias_ids);
    free(req->bias);
    req->bias_ids = malloc(room * sizeof *req->bias_ids);
    req->bias = malloc(room * sizeof *req->bias);
    if (!req->bias_ids || !req->bias) return st_fail(err, "no_memory", "no memory for %zu biases", room);
    int n = 0;
    while (p < end) {
        double v;
        if (one_id(&p, end, n_vocab, &req->bias_ids[n], err)) return -1;
        if (p == end || *p++ != ':') return st_fail(err, "bad_key", "logit_bias is a list of id:bias");
        word value = {p, 0};
        while (p < end && *p != ',') p++;
        value.n = (size_t)(p - value.at);
        if (number(value, &v) || !(v <= 1e6)) return st_fail(err, "bad_key", "logit_bias %.*s is no number", shown(value), value.at);
        req->bias[n++] = (float)v;
        if (p < end) p++;
    }
    req->sampling.n_bias = n;
    req->sampling.bias_ids = req->bias_ids;
    req->sampling.bias_values = req->bias;
    return 0;
}

/* ---- the line ----------------------------------------------------------------------------------------------- */

static int parse_key(word w, size_t name_len, int n_vocab, st_request *req, st_error *err) {
    word name = {w.at, name_len}, value = {w.at + name_len + 1, w.n - name_len - 1};
    for (size_t i = 0; i < sizeof KEYS / sizeof *KEYS; i++) {
        if (!is(name, KEYS[i].name)) continue;
        char *at = (char *)req + KEYS[i].at;
        double v;
        if (KEYS[i].kind == BIAS) return parse_bias(value, n_vocab, req, err);
        if (KEYS[i].kind == U64)
            return seed_number(value, (uint64_t *)(void *)at) ? st_fail(err, "bad_key", "seed %.*s is no 64-bit integer", shown(value), value.at) : 0;
        if (number(value, &v) || !(v >= KEYS[i].lo && v <= KEYS[i].hi) || (KEYS[i].kind != FLOAT && v != floor(v)))
            return st_fail(err, "bad_key", "%s %.*s is not %s in %g..%g", KEYS[i].name, shown(value), value.at,
                           KEYS[i].kind == FLOAT ? "a number" : "an integer", KEYS[i].lo, KEYS[i].hi);
        if (KEYS[i].kind == FLOAT) *(float *)(void *)at = (float)v;
        else if (KEYS[i].kind == INT) *(int *)(void *)at = (int)v;
        else *(uint32_t *)(void *)at = (uint32_t)v;
        return 0;
    }
    return 0;
}

static int parse_gen(const char *p, int n_vocab, st_request *req, st_error *err) {
    double max_new;
    st_sampling_init(&req->sampling);
    req->sampling.penalty_last_n = 64;
    req->logprobs = -1;
    req->keep = 1;
    req->out_from = -1;
    req->spec_min_p = req->spec_p_cum = req->spec_p_cum_deep = -1;
    word w = next_word(&p);
    if (number(w, &max_new) || !(max_new >= 1 && max_new <= 2147483647) || max_new != floor(max_new))
        return st_fail(err, "bad_max_new", "GEN <max_new> is an integer of at least 1, not \"%.*s\"", shown(w), w.at);
    req->max_new = (int)max_new;
    for (;;) {
        w = next_word(&p);
        if (!w.n) return st_fail(err, "bad_ids", "GEN needs token ids after max_new and the keys");
        const char *eq = memchr(w.at, '=', w.n);
        if (!eq) break;
        if (parse_key(w, (size_t)(eq - w.at), n_vocab, req, err)) return -1;
    }
    if (parse_ids(w, n_vocab, req, err)) return -1;
    if (next_word(&p).n) return st_fail(err, "bad_ids", "nothing may follow the token ids (no blanks between them)");
    if (req->out_from > req->n_ids)
        return st_fail(err, "bad_key", "out_from %d is behind the %d token ids", req->out_from, req->n_ids);
    return st_sampling_check(&req->sampling, n_vocab, err);
}

static int parse_slot(const char **p, const char *command, st_request *req, st_error *err) {
    double v;
    word w = next_word(p);
    if (number(w, &v) || !(v >= 0 && v < 1e6) || v != floor(v))
        return st_fail(err, "bad_slot", "%s <slot> is a number from 0, not \"%.*s\"", command, shown(w), w.at);
    req->slot = (int)v;
    return 0;
}

/* The number of a transfer, 1 to 2^63 - 1. */
static int parse_transfer(const char **p, const char *command, st_request *req, st_error *err) {
    uint64_t x;
    word w = next_word(p);
    if (!w.n || *w.at == '-' || seed_number(w, &x) || x < 1 || x > INT64_MAX)
        return st_fail(err, "bad_transfer", "%s <x> is a number from 1 to 2^63 - 1, not \"%.*s\"", command, shown(w), w.at);
    req->transfer = x;
    return 0;
}

static int parse_tokens(const char **p, const char *command, st_request *req, st_error *err) {
    double v;
    word w = next_word(p);
    if (number(w, &v) || !(v >= 1 && v <= 2147483647) || v != floor(v))
        return st_fail(err, "no_position", "%s <tokens> is a number from 1, not \"%.*s\"", command, shown(w), w.at);
    req->tokens = (int)v;
    return 0;
}

static int digit(char c) {
    const char *digits = "0123456789abcdef", *at = c ? strchr(digits, c | 0x20) : NULL;
    return at ? (int)(at - digits) : -1;
}

/* Bytes in hexadecimal digits, or - for none. */
static int parse_bits(const char **p, const char *command, st_request *req, st_error *err) {
    word w = next_word(p);
    if (is(w, "-")) return 0;
    if (!w.n || w.n % 2 || w.n > 1 << 24) return st_fail(err, "bad_transfer", "%s <bits> are bytes of two hexadecimal digits, or -", command);
    if (!(req->bits = malloc(w.n / 2))) return st_fail(err, "no_memory", "no memory for a list of entries");
    for (size_t i = 0; i < w.n; i += 2) {
        int high = digit(w.at[i]), low = digit(w.at[i + 1]);
        if (high < 0 || low < 0) return st_fail(err, "bad_transfer", "%s <bits> are bytes of two hexadecimal digits, or -", command);
        req->bits[req->n_bits++] = (uint8_t)(high * 16 + low);
    }
    return 0;
}

static int parse_part(char part, const char **p, const char *command, int n_vocab, st_request *req, st_error *err) {
    switch (part) {
    case 's': return parse_slot(p, command, req, err);
    case 'x': return parse_transfer(p, command, req, err);
    case 'p': return parse_tokens(p, command, req, err);
    case 'w': return parse_bits(p, command, req, err);
    default: return parse_gen(*p, n_vocab, req, err);
    }
}

int st_parse_line(const char *line, int n_vocab, st_request *req, st_error *err) {
    word w = next_word(&line);
    req->slot = req->command = -1;
    for (size_t i = 0; i < sizeof COMMANDS / sizeof *COMMANDS; i++) {
        if (!is(w, COMMANDS[i].word)) continue;
        req->command = COMMANDS[i].command;
        for (const char *part = COMMANDS[i].follows; *part; part++)
            if (parse_part(*part, &line, COMMANDS[i].word, n_vocab, req, err)) return -1;
        return req->command;
    }
    return st_fail(err, "bad_command", "unknown command \"%.*s\"; known are GEN, BGEN, STOP, BSTOP, BYIELD, PARK, WANT, RESTORE, XSTOP, STAT, QUIT",
                   shown(w), w.at);
}

void st_request_free(st_request *req) {
    free(req->ids);
    free(req->bias_ids);
    free(req->bias);
    free(req->bits);
    memset(req, 0, sizeof *req);
}
