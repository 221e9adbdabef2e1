/* How deep to draft (declarations: strata.h). Costs of windows and draft passes and acceptance by depth are measured as
 * they happen. For all slots of a window together, the drafts most likely to be right are taken, as many as raise the
 * expected tokens per millisecond, and none where drafts do not pay: passes of the drafter and the fixed part of the
 * window serve all slots, so no slot can decide alone.
 *
 * The cost of a window is no straight line over its rows (small windows take other paths), so each row count has a mean
 * of its own; a line through all of them stands in for those not yet seen. One common factor follows the machine, which
 * others may use too: a row count seen long ago is not believed to be as fast as the machine was then.
 *
 * A depth that is not tried loses its bad name slowly, so it is tried again: text changes. */
#ifndef ST_SPECULATE_H
#define ST_SPECULATE_H

#include "strata.h"

enum { ST_SPEC_DEPTHS = 8, ST_SPEC_ROWS = 64, ST_SPEC_SLOTS = 65 };

#endif
