#include "window.h"

#include <math.h>

enum { LEAST_PROMPT_ROWS = 8 };

void st_pace_init(st_pace *p, int max_rows, double stall_target_ms, double decode_share) {
    *p = (st_pace){.stall_target_ms = stall_target_ms, .decode_share = decode_share, .max_rows = max_rows};
}

/* Prompt rows that fit beside decoding slots. The fastest rate seen, not a mean: a mean would shrink with its own effect,
 * since short chunks read more slowly. Before anything is known, a short probe. */
static int prompt_budget(const st_pace *p, int decode_rows, int decoders) {
    int left = p->max_rows;
    if (!decoders) return left;
    double fit = p->best_rows_per_ms > 0 ? p->stall_target_ms * p->best_rows_per_ms - decode_rows : 4.0 * LEAST_PROMPT_ROWS;
    int rows = fit < LEAST_PROMPT_ROWS ? LEAST_PROMPT_ROWS : fit > left ? left : (int)fit;
    return rows < left ? rows : left;
}

/* Milliseconds still to read, less what was already waited. */
static double urgency(const st_pace *p, const st_view *v) {
    double rate = p->best_rows_per_ms > 0 ? p->best_rows_per_ms : 1.0;
    return v->reading / rate - v->waited_ms;
}

int st_window_plan(const st_pace *p, const st_view *view, int n, int *rows) {
    int decoders = 0, used = 0, prompt = 0;
    for (int i = 0; i < n; i++) {
        rows[i] = view[i].decoding;
        used += view[i].decoding;
        decoders += view[i].decoding > 0;
    }
    if (decoders && p->debt_ms > 0) return 0;
    for (int budget = prompt_budget(p, used, decoders); budget > 0;) {
        int best = -1;
        for (int i = 0; i < n; i++)
            if (view[i].reading && !rows[i] && (best < 0 || urgency(p, &view[i]) < urgency(p, &view[best]))) best = i;
        if (best < 0) break;
        int cut = view[best].until_cut, want = cut > 0 && cut < view[best].reading ? cut : view[best].reading;
        rows[best] = want < budget ? want : budget;
        budget -= rows[best];
        prompt += rows[best];
    }
    return prompt;
}

void st_pace_account(st_pace *p, double ms, int prompt_rows, int total, int decoders) {
    if (prompt_rows && ms > 0) {
        double rate = total / ms;
        p->best_rows_per_ms *= 0.999; /* a machine that has become slower is believed in the end */
        if (rate > p->best_rows_per_ms && total >= LEAST_PROMPT_ROWS) p->best_rows_per_ms = rate;
    }
    if (prompt_rows && decoders) p->debt_ms = p->decode_share * ms;
    else if (!prompt_rows) p->debt_ms = p->debt_ms > ms ? p->debt_ms - ms : 0.0;
    if (!decoders) p->debt_ms = 0.0;
}
