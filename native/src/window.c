#include "window.h"

#include <math.h>

enum { LEAST_PROMPT_ROWS = 8, PROBE_ROWS = 32 };

void st_pace_init(st_pace *p, int max_rows, double stall_target_ms, double decode_share) {
    *p = (st_pace){.stall_target_ms = stall_target_ms, .decode_share = decode_share, .max_rows = max_rows, .tried = PROBE_ROWS / 2};
}

/* ---- what a prompt row costs ---------------------------------------------------------------------------------- */

/* Milliseconds of n prompt rows that begin at position `depth`. Attention makes a row dearer the deeper it stands, in
 * proportion; everything else costs the same everywhere. Before anything is known, a millisecond a row. */
static double rows_ms(const st_pace *p, int depth, int n) {
    double row = p->row_ms > 0 ? p->row_ms : 1.0;
    return n * row * (1 + p->deeper * (depth + 0.5 * n));
}

/* Rows that fit into `ms`: rows_ms solved for n. */
static double rows_that_fit(const st_pace *p, int depth, double ms) {
    if (p->row_ms <= 0) return PROBE_ROWS;
    double a = 0.5 * p->row_ms * p->deeper, b = p->row_ms * (1 + p->deeper * depth);
    return a > 0 ? 2 * ms / (b + sqrt(b * b + 4 * a * ms)) : ms / b;
}

/* How much dearer a position makes a row: the slope of a line through the windows of late, weighed by their rows, as a
 * share of what a row costs at the beginning. Windows of about one depth say nothing about it. */
static void learn_depth(st_pace *p, double ms, int n, double depth) {
    enum { TELLING_SPREAD = 128, SLOWLY = 50 };
    st_pace_line *l = &p->line;
    double keep = 1 - 1.0 / SLOWLY;
    *l = (st_pace_line){l->n * keep + n, l->depth * keep + n * depth, l->ms * keep + ms, l->depth2 * keep + n * depth * depth, l->depth_ms * keep + ms * depth};
    double mean = l->depth / l->n, spread = l->depth2 / l->n - mean * mean;
    if (spread < (double)TELLING_SPREAD * TELLING_SPREAD) return;
    double slope = (l->depth_ms / l->n - mean * (l->ms / l->n)) / spread, begin = l->ms / l->n - slope * mean;
    if (slope >= 0 && begin > 0) p->deeper = slope / begin;
}

/* A dearer row is believed at once, since the next window must not be too long; a cheaper one by degrees. */
static void learn_row(st_pace *p, double ms, int n, double depth) {
    double row = ms / n, before = p->row_ms * (1 + p->deeper * depth);
    learn_depth(p, ms, n, depth);
    if (row < before) row = before + 0.25 * (row - before);
    p->row_ms = row / (1 + p->deeper * depth);
    if (n > p->tried) p->tried = n;
}

/* ---- the plan ------------------------------------------------------------------------------------------------- */

/* Milliseconds for prompt rows: what the stall target leaves beside the decode rows' own time. Where decoding alone
 * takes more than half the target, a window may take twice that, or a prompt would not be read at all. */
static double reading_budget(const st_pace *p) { return fmax(p->stall_target_ms, 2 * p->decode_ms) - p->decode_ms; }

/* Prompt rows of a slot, of `room` at most. Beside decoding slots a read goes on however short the time, and a count of
 * rows that was not tried yet is come by in steps, since a row's cost depends on it too. */
static int fitting(const st_pace *p, const st_view *v, double ms, int room) {
    int least = room < LEAST_PROMPT_ROWS ? room : LEAST_PROMPT_ROWS, most = 2 * p->tried < room ? 2 * p->tried : room;
    double fit = rows_that_fit(p, v->depth, ms);
    return fit < least ? least : fit < most ? (int)fit : most;
}

/* Milliseconds still to read, less what was already waited. */
static double urgency(const st_pace *p, const st_view *v) { return rows_ms(p, v->depth, v->reading) - v->waited_ms; }

int st_window_plan(const st_pace *p, const st_view *view, int n, int *rows) {
    int decoders = 0, prompt = 0;
    for (int i = 0; i < n; i++) {
        rows[i] = view[i].decoding;
        decoders += view[i].decoding > 0;
    }
    if (decoders && p->debt_ms > 0) return 0;
    for (double ms = reading_budget(p); prompt < p->max_rows && (!prompt || ms > 0);) {
        int best = -1;
        for (int i = 0; i < n; i++)
            if (view[i].reading && !rows[i] && (best < 0 || urgency(p, &view[i]) < urgency(p, &view[best]))) best = i;
        if (best < 0) break;
        const st_view *v = &view[best];
        int want = v->until_cut > 0 && v->until_cut < v->reading ? v->until_cut : v->reading;
        int room = decoders ? fitting(p, v, ms, p->max_rows - prompt) : p->max_rows - prompt;
        rows[best] = want < room ? want : room;
        if (decoders) ms = want < room ? ms - rows_ms(p, v->depth, rows[best]) : 0;
        prompt += rows[best];
    }
    return prompt;
}

void st_pace_account(st_pace *p, double ms, int prompt_rows, double depth, int decoders) {
    double reading_ms = decoders ? fmax(ms - p->decode_ms, 0.0) : ms;
    if (prompt_rows >= LEAST_PROMPT_ROWS || prompt_rows == p->max_rows) learn_row(p, reading_ms, prompt_rows, depth);
    if (!prompt_rows && decoders) p->decode_ms = p->decode_ms > 0 ? p->decode_ms + 0.25 * (ms - p->decode_ms) : ms;
    /* What was decoded beyond the debt counts for the next one, up to a window's worth. */
    p->debt_ms = !decoders ? 0.0 : prompt_rows ? p->debt_ms + p->decode_share * reading_ms : fmax(p->debt_ms - ms, -ms);
}
