/* What goes into the next window: pure policy over a view of the slots, so that it can be tested by itself.
 *
 * Decoding slots come first, each with its certain row and its drafts. Prompt rows ride along, as many as fit the stall
 * target, in the order of the time that is left to read minus the time already waited: the shortest first, but nobody
 * waits for ever. After a window with prompt rows, decode-only windows run until they have had `decode_share` of the
 * time that these took. Without decoding slots a window is as long as it may be. */
#ifndef ST_WINDOW_H
#define ST_WINDOW_H

#include "strata.h"

#define ST_MAX_SLOTS 64

#endif
