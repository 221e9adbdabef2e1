/* The engine's loop: requests in, windows, tokens out. */
#ifndef ST_ENGINE_H
#define ST_ENGINE_H

#include "model/model.h"
#include "options.h"

#define ST_ENGINE_VERSION "0.1.0"

/* Serve the protocol until QUIT, end of input or a signal. Returns the exit status. */
int st_engine_serve(st_model *m, const st_options *o);

/* 32 hex digits and a NUL naming everything that decides a token's bits besides prefix and sampling. */
void st_engine_identity(const st_model *m, const char *kv, char *hex);

#endif
