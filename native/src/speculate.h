/* How deep to draft. Costs of windows and draft passes and acceptance by depth are measured as they happen; a slot
 * drafts as deep as the expected tokens per millisecond rise, and not at all where drafts do not pay. */
#ifndef ST_SPECULATE_H
#define ST_SPECULATE_H

#include "strata.h"

enum { ST_SPEC_DEPTHS = 8 };

/* Options: most drafts in a window; the least probability of a draft; the product rule (0 in base: off). */
typedef struct st_spec_rule {
    int depth;
    float min_p, cum_base, cum_deep;
    int deep_from, deep_at; /* positions between which the product threshold goes from base to deep */
} st_spec_rule;

/* Threshold of the product of draft probabilities at a position; 0 when the rule is off. */
ST_API float st_spec_threshold(const st_spec_rule *r, int position);
/* STRATA_SPEC_PCUM=base[,deep[,d0,d1]] into the rule. -1 and err (usage) when malformed. */
ST_API int st_spec_parse(const char *text, st_spec_rule *r, st_error *err);

/* Acceptance of one slot: how often draft i was right when all before it were, as moving averages. */
typedef struct st_acceptance {
    float right[ST_SPEC_DEPTHS];
    uint64_t offered, accepted;
    int skipped; /* windows without drafts since the last try */
} st_acceptance;

/* Costs on this machine, in milliseconds. */
typedef struct st_spec_cost {
    double window_base, window_row; /* window of r rows: base + row * r, fitted to decode windows */
    double draft_pass;              /* one draft step of a window */
    double fit[5];                  /* running sums of the fit: weight, rows, rows^2, ms, rows * ms */
    int windows, passes;
} st_spec_cost;

ST_API void st_acceptance_init(st_acceptance *a);
ST_API void st_acceptance_count(st_acceptance *a, int offered, int accepted);
ST_API void st_spec_count_window(st_spec_cost *c, int rows, double ms);
ST_API void st_spec_count_drafts(st_spec_cost *c, int passes, double ms);
/* Depth for a slot in a window whose other slots bring `other_rows`; at most `most`. */
ST_API int st_spec_depth(const st_spec_cost *c, st_acceptance *a, int other_rows, int slots, int most);

#endif
