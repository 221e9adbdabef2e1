/* The line protocol, from the daemon's side to ours: one table of commands, one of request keys. The parsed request is
 * declared in strata.h. Answers are written where they arise (engine.c); their forms are in man/strata-engine.8. */
#ifndef ST_PROTOCOL_H
#define ST_PROTOCOL_H

#include "strata.h"

#define ST_PROTOCOL_VERSION 1

#endif
