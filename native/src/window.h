/* What goes into the next window: pure policy over a view of the slots, so that it can be tested by itself.
 *
 * Decoding slots come first, each with its certain row and its drafts. Prompt rows ride along, as many as fit the stall
 * target, in the order of the time that is left to read minus the time already waited: the shortest first, but nobody
 * waits for ever. After a window with prompt rows, decode-only windows run until they have had `decode_share` of its
 * time. Without decoding slots a window is as long as it may be. */
#ifndef ST_WINDOW_H
#define ST_WINDOW_H

#include "strata.h"

#define ST_MAX_SLOTS 64

/* A slot as the policy sees it. */
typedef struct st_view {
    int decoding;     /* rows it wants: 1 + drafts; 0 when it does not decode */
    int reading;      /* prompt tokens left; 0 when it does not read */
    int until_cut;    /* of these, how many until the read must stop for a checkpoint */
    double waited_ms; /* since its request came in, or since it last had prompt rows */
} st_view;

/* State of the pacing between windows. */
typedef struct st_pace {
    double stall_target_ms, decode_share;
    int max_rows;
    double best_rows_per_ms; /* fastest prompt reading seen lately */
    double debt_ms;          /* decode time owed for prompt rows */
} st_pace;

ST_API void st_pace_init(st_pace *p, int max_rows, double stall_target_ms, double decode_share);
/* Rows for each of n slots (in `rows`) of the next window. Returns the number of prompt rows among them. */
ST_API int st_window_plan(const st_pace *p, const st_view *view, int n, int *rows);
/* Account for a finished window of `ms` with that many prompt rows of `total` rows; decoders: slots that decode. */
ST_API void st_pace_account(st_pace *p, double ms, int prompt_rows, int total, int decoders);

#endif
