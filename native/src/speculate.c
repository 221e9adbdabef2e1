#include "speculate.h"

#include "errors.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LEARN = 12, MOST_DRAFTS_SEEN = 32, RENEWED = 6, MOST_WINDOWS_SEEN = 200 };
static const float PRIOR = 0.8f, LEAST = 0.02f, FORGIVE = 0.002f; /* of acceptance; the last per window without a try */

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
    for (int i = 0; i < ST_SPEC_DEPTHS; i++) a->right[i] = PRIOR;
}

void st_acceptance_renew(st_acceptance *a) {
    for (int i = 0; i < ST_SPEC_DEPTHS; i++) {
        if (a->seen[i] > RENEWED) a->seen[i] = RENEWED;
        a->right[i] = 0.5f * (a->right[i] + PRIOR);
    }
}

void st_acceptance_count(st_acceptance *a, int offered, int accepted) {
    a->offered += (uint64_t)offered;
    a->accepted += (uint64_t)accepted;
    for (int i = 0; i < offered && i <= accepted && i < ST_SPEC_DEPTHS; i++) {
        a->right[i] += ((i < accepted ? 1.0f : 0.0f) - a->right[i]) / (float)(a->seen[i] + 2);
        if (a->right[i] < LEAST) a->right[i] = LEAST;
        if (a->seen[i] < MOST_DRAFTS_SEEN) a->seen[i]++;
    }
}

/* A straight line through the shape: least squares, by how often each row count was seen. */
static void fit_line(st_spec_cost *c) {
    double n = 0, x = 0, xx = 0, y = 0, xy = 0;
    for (int i = 0; i < ST_SPEC_ROWS; i++) {
        double w = c->seen[i], r = i + 1, ms = (double)c->shape[i];
        n += w, x += w * r, xx += w * r * r, y += w * ms, xy += w * r * ms;
    }
    double det = n * xx - x * x, row = det > 0 ? (n * xy - x * y) / det : 0.5 * y / x; /* one row count: half is fixed */
    if (row < 0) row = 0;
    double base = (y - row * x) / n;
    if (base < 0) base = 0, row = y / x;
    c->window_base = c->scale * base;
    c->window_row = c->scale * row;
}

double st_spec_window_ms(const st_spec_cost *c, int rows) {
    double line = c->window_base + c->window_row * rows;
    if (rows < 1 || rows > ST_SPEC_ROWS || !c->seen[rows - 1]) return line;
    double trust = c->seen[rows - 1] / (c->seen[rows - 1] + (rows > 8 ? 3.0 : 0.5));
    return trust * c->scale * (double)c->shape[rows - 1] + (1 - trust) * line;
}

/* A step towards the value that two fifths of the samples lie below: windows that were held up say little. */
static double towards(double x, int above, double step) { return above ? x * (1 + 0.4 * step) : x / (1 + 0.6 * step); }

void st_spec_count_window(st_spec_cost *c, int rows, double ms) {
    if (rows < 1 || ms <= 0) return;
    if (c->windows++ > LEARN) { /* a window held up by something else says nothing of its cost */
        double most = 3 * st_spec_window_ms(c, rows);
        if (ms > most) ms = most;
    }
    if (!c->scale) c->scale = 1;
    if (rows > ST_SPEC_ROWS) return;
    float *shape = &c->shape[rows - 1];
    int seen = c->seen[rows - 1];
    double is = ms / c->scale;
    if (seen < 3) *shape = !seen || is < (double)*shape ? (float)is : *shape; /* what held one up did not hold up all */
    else {
        c->scale = towards(c->scale, is > (double)*shape, 0.02 * (seen < 20 ? seen / 20.0 : 1)); /* well-known ones tell */
        *shape = (float)towards((double)*shape, is > (double)*shape, seen < MOST_WINDOWS_SEEN ? 0.5 / seen : 0.5 / MOST_WINDOWS_SEEN);
    }
    if (seen < MOST_WINDOWS_SEEN) c->seen[rows - 1]++;
    fit_line(c);
}

void st_spec_count_drafts(st_spec_cost *c, int passes, double ms) {
    if (passes < 1) return;
    double each = ms / passes;
    if (c->passes < 2) c->draft_pass = !c->passes || each < c->draft_pass ? each : c->draft_pass;
    else c->draft_pass = towards(c->draft_pass, each > c->draft_pass, c->passes < 20 ? 0.2 : 0.05);
    c->passes++;
}

/* What was seen seldom may be cheaper than it looked: so it is looked at again. */
static double hopeful_ms(const st_spec_cost *c, int rows) {
    int seen = rows <= ST_SPEC_ROWS ? c->seen[rows - 1] : MOST_WINDOWS_SEEN;
    return st_spec_window_ms(c, rows) * (1 - 0.15 / (seen + 1));
}

/* One more draft of one slot: what it brings, if the drafts before it are taken too. */
typedef struct step {
    float chance;
    int slot, depth;
} step;

/* The most promising first; a slot's own in order. */
static int by_chance(const void *a, const void *b) {
    const step *x = a, *y = b;
    return x->chance != y->chance ? (x->chance < y->chance ? 1 : -1) : x->depth != y->depth ? x->depth - y->depth : x->slot - y->slot;
}

static int list_steps(st_acceptance *const *a, const int *most, int n, step *steps) {
    int count = 0;
    for (int i = 0; i < n; i++) {
        float chance = 1;
        for (int k = 1; k <= most[i] && k <= ST_SPEC_DEPTHS; k++) {
            chance *= a[i]->right[k - 1];
            steps[count++] = (step){chance, i, k};
        }
    }
    qsort(steps, (size_t)count, sizeof *steps, by_chance);
    return count;
}

/* The number of steps, of those at most `depth` deep and the best first, that brings the most tokens a millisecond. */
static int best_steps(const st_spec_cost *c, const step *steps, int count, int n, int depth, double *best_rate) {
    double tokens = n;
    int rows = n, best = -1;
    for (int i = 0; i < count; i++) {
        if (steps[i].depth > depth) continue;
        tokens += (double)steps[i].chance;
        double rate = tokens / (hopeful_ms(c, ++rows) + c->draft_pass * depth);
        if (rate > *best_rate * 1.003) *best_rate = rate, best = rows - n;
    }
    return best;
}

void st_spec_depths(const st_spec_cost *c, st_acceptance *const *a, const int *most, int n, int *depth) {
    step steps[(ST_SPEC_SLOTS)*ST_SPEC_DEPTHS];
    int deepest = 0, take = 0;
    for (int i = 0; i < n; i++) {
        depth[i] = most[i] > 0 ? (c->windows + 1) % ((most[i] < ST_SPEC_DEPTHS ? most[i] : ST_SPEC_DEPTHS) + 1) : 0;
        if (most[i] > deepest) deepest = most[i];
    }
    if (deepest > ST_SPEC_DEPTHS) deepest = ST_SPEC_DEPTHS;
    if (n < 1 || n > ST_SPEC_SLOTS || c->windows < 2 * (deepest + 1) + 2 || c->passes < LEARN) return; /* every depth in turn */
    int count = list_steps(a, most, n, steps), chosen = 0;
    double rate = n / hopeful_ms(c, n);
    for (int k = 1; k <= deepest; k++) {
        int better = best_steps(c, steps, count, n, k, &rate);
        if (better >= 0) take = better, chosen = k;
    }
    memset(depth, 0, (size_t)n * sizeof *depth);
    for (int i = 0; i < count && take; i++)
        if (steps[i].depth <= chosen) depth[steps[i].slot] = steps[i].depth, take--;
    for (int i = 0; i < n; i++)
        for (int k = depth[i]; k < ST_SPEC_DEPTHS; k++) a[i]->right[k] += FORGIVE * a[i]->right[k] * (1 - a[i]->right[k]);
}
