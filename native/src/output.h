/* Protocol lines to stdout. Lines gather in a buffer; a flush hands over what the reader takes without ever waiting
 * for it, so a daemon that does not read never stalls a window (the engine bounds how much may gather). */
#ifndef ST_OUTPUT_H
#define ST_OUTPUT_H

#include <stddef.h>

/* Append one line (the newline is added). */
__attribute__((format(printf, 1, 2))) void st_out_line(const char *fmt, ...);
/* Append without a newline: for lines made of parts. */
__attribute__((format(printf, 1, 2))) void st_out_part(const char *fmt, ...);
/* Write what fits now. -1 when the reader has gone. */
int st_out_flush(void);
/* Write everything, waiting for the reader. -1 when it has gone. */
int st_out_drain(void);
/* Bytes waiting. */
size_t st_out_pending(void);

#endif
