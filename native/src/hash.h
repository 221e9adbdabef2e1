/* BLAKE2b and the page keys made with it; the functions are public (strata.h). */
#ifndef ST_HASH_H
#define ST_HASH_H

#include "strata.h"

#endif
