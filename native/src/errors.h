/* Failures as values (struct st_error in strata.h). */
#ifndef ST_ERRORS_H
#define ST_ERRORS_H

#include <stdarg.h>

#include "strata.h"

/* Fill `err` (may be NULL) and return -1, so that `return st_fail(...)` reads well.
 *
 * name: one of the table of names (model_open, model_format, model_unsupported, no_memory, ...).
 * fmt:  printf format of the text. Whatever the arguments hold (names out of an untrusted file, paths), the result is
 *       one printable line of valid UTF-8: control characters, line and direction marks and invalid bytes become
 *       \n, \t or \xNN; a text too long ends in "...". */
__attribute__((format(printf, 3, 4))) int st_fail(st_error *err, const char *name, const char *fmt, ...);
__attribute__((format(printf, 3, 0))) int st_vfail(st_error *err, const char *name, const char *fmt, va_list args);

/* Length (1..4) of the valid UTF-8 character at s, which has `left` bytes, and its code point; 0 when it is invalid,
 * overlong, a surrogate or cut off. */
int st_utf8_char(const unsigned char *s, size_t left, uint32_t *point);

#endif
