/* `strata-engine --self-test`: every kernel of an instruction set against the scalar specification, bit for bit. */
#ifndef ST_SELFTEST_H
#define ST_SELFTEST_H

#include "strata.h"

/* Compare `isa` with scalar over `rounds` rounds of random and extreme inputs. Returns the number of differing
 * results, each named once on stderr; 0 means equal. -1 and err when the instruction set is not here. */
ST_API int st_selftest(const char *isa, int rounds, uint64_t seed, st_error *err);

/* Print each kernel's rate in GB/s of weights and GOP/s to stdout, one line per shape and row count. */
int st_selftest_bench(const char *isa, st_error *err);

#endif
