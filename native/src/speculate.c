#include "speculate.h"

#include "errors.h"

#include <stdio.h>
#include <stdlib.h>

enum { PROBE_EVERY = 64, LEARN = 12 };

float st_spec_threshold(const st_spec_rule *r, int position) {
    if (r->cum_base <= 0.0f) return 0.0f;
    if (position <= r->deep_from || r->cum_deep <= 0.0f) return r->cum_base;
    if (position >= r->deep_at) return r->cum_deep;
    return r->cum_base + (r->cum_deep - r->cum_base) * (float)(position - r->deep_from) / (float)(r->deep_at - r->deep_from);
}

int st_spec_parse(const char *text, st_spec_rule *r, st_error *err) {
    double base, deep;
    int from = 16384, at = 49152, used = 0;
    int n = sscanf(text, "%lf%n", &base, &used);
    deep = base;
    if (n == 1 && text[used] == ',') {
        int more = 0;
        n += sscanf(text + used, ",%lf%n", &deep, &more);
        used += more;
        if (n == 2 && text[used] == ',') {
            more = 0;
            if (sscanf(text + used, ",%d,%d%n", &from, &at, &more) != 2) n = 0;
            used += more;
        }
    }
    if (n < 1 || text[used] || !(base >= 0 && base <= 1 && deep >= 0 && deep <= 1) || from < 0 || at <= from)
        return st_fail(err, "usage", "STRATA_SPEC_PCUM=%s: wanted is base[,deep[,d0,d1]], probabilities 0..1 and positions d0 < d1", text);
    r->cum_base = (float)base;
    r->cum_deep = (float)deep;
    r->deep_from = from;
    r->deep_at = at;
    return 0;
}

void st_acceptance_init(st_acceptance *a) {
    *a = (st_acceptance){0};
    for (int i = 0; i < ST_SPEC_DEPTHS; i++) a->right[i] = 0.8f;
}

void st_acceptance_count(st_acceptance *a, int offered, int accepted) {
    const float rate = 0.1f;
    a->offered += (uint64_t)offered;
    a->accepted += (uint64_t)accepted;
    for (int i = 0; i < offered && i <= accepted && i < ST_SPEC_DEPTHS; i++)
        a->right[i] += rate * ((i < accepted ? 1.0f : 0.0f) - a->right[i]);
}

/* Least squares over recent windows: old ones fade, so that a machine that slows down is followed. */
void st_spec_count_window(st_spec_cost *c, int rows, double ms) {
    if (c->windows > LEARN) { /* a window held up by something else says nothing of its cost */
        double expect = c->window_base + c->window_row * rows;
        if (ms > 3 * expect) ms = 3 * expect;
    }
    double sample[5] = {1, rows, (double)rows * rows, ms, rows * ms};
    for (int i = 0; i < 5; i++) c->fit[i] = 0.98 * c->fit[i] + sample[i];
    double n = c->fit[0], x = c->fit[1], xx = c->fit[2], y = c->fit[3], xy = c->fit[4], det = n * xx - x * x;
    c->windows++;
    if (det > 1e-3 * n * n) {
        c->window_row = (n * xy - x * y) / det;
        if (c->window_row < 0) c->window_row = 0;
        c->window_base = (y - c->window_row * x) / n;
        if (c->window_base < 0) c->window_base = 0;
    } else { /* only one row count so far: half of it is taken as fixed */
        c->window_base = 0.5 * y / n;
        c->window_row = 0.5 * y / x;
    }
}

void st_spec_count_drafts(st_spec_cost *c, int passes, double ms) {
    if (passes < 1) return;
    double each = ms / passes, rate = c->passes++ ? 0.1 : 1.0;
    if (c->passes > LEARN && each > 3 * c->draft_pass) each = 3 * c->draft_pass;
    c->draft_pass += rate * (each - c->draft_pass);
}

int st_spec_depth(const st_spec_cost *c, st_acceptance *a, int other_rows, int slots, int most) {
    if (most > ST_SPEC_DEPTHS) most = ST_SPEC_DEPTHS;
    if (c->windows < LEARN || c->passes < LEARN) { /* learn: every depth in turn */
        return most ? (c->windows + 1) % (most + 1) : 0;
    }
    /* Draft passes serve all slots together, so a slot bears its share. Its part of the window: its rows, and its share
     * of the fixed part. */
    double pass = c->draft_pass / (slots > 0 ? slots : 1);
    double fixed = (c->window_base + c->window_row * other_rows) / (slots > 0 ? slots : 1);
    double tokens = 1, chance = 1, best_rate = 0;
    int best = 0;
    for (int k = 0; k <= most; k++) {
        if (k) chance *= a->right[k - 1], tokens += chance;
        double rate = tokens / (fixed + c->window_row * (1 + k) + pass * k);
        if (rate > best_rate * (k ? 1.01 : 1.0)) best_rate = rate, best = k;
    }
    if (best) a->skipped = 0;
    else if (most && ++a->skipped >= PROBE_EVERY) { /* text changes: try one draft now and then */
        a->skipped = 0;
        return 1;
    }
    return best;
}
