#include "session.h"

#include "errors.h"
#include "kernels/kernels.h"

#include <stdlib.h>
#include <string.h>

size_t st_block_bytes(const st_shape *shape) {
    return st_kv_bytes(shape->kv, shape->head_dim) * (size_t)shape->kv_heads * (size_t)shape->attn_layers;
}

size_t st_session_fixed_bytes(const st_shape *shape) {
    return (shape->state_floats + shape->conv_floats) * sizeof(float) * (size_t)shape->recurrent_layers;
}

void st_session_free(st_session *s) {
    if (!s) return;
    for (int i = 0; i < s->n_blocks; i++) free(s->blocks[i]);
    free(s->blocks);
    free(s->ids);
    free(s->states);
    free(s->convs);
    free(s);
}

static void *zeroed(size_t bytes) {
    void *p = NULL;
    if (posix_memalign(&p, 64, bytes ? bytes : 64)) return NULL;
    memset(p, 0, bytes);
    return p;
}

int st_session_new(const st_shape *shape, st_session **out, st_error *err) {
    st_session *s = calloc(1, sizeof *s);
    if (s) {
        size_t layers = (size_t)shape->recurrent_layers;
        s->shape = *shape;
        s->ids = zeroed((size_t)shape->max_context * sizeof *s->ids);
        s->blocks = zeroed((size_t)(shape->max_context + 63) / 64 * sizeof *s->blocks);
        s->states = zeroed(shape->state_floats * layers * sizeof(float));
        s->convs = zeroed(shape->conv_floats * layers * sizeof(float));
    }
    if (!s || !s->ids || !s->blocks || !s->states || !s->convs) {
        st_session_free(s);
        return st_fail(err, "no_memory", "no memory for a session of %d positions (%zu MiB of recurrent state)",
                       shape->max_context, st_session_fixed_bytes(shape) >> 20);
    }
    *out = s;
    return 0;
}

void st_session_clear(st_session *s) {
    s->n = 0;
    memset(s->states, 0, s->shape.state_floats * (size_t)s->shape.recurrent_layers * sizeof(float));
    memset(s->convs, 0, s->shape.conv_floats * (size_t)s->shape.recurrent_layers * sizeof(float));
}

int st_session_reserve(st_session *s, int upto, st_error *err) {
    int want = (upto + 63) / 64;
    while (s->n_blocks < want) {
        uint8_t *b = zeroed(st_block_bytes(&s->shape));
        if (!b) return st_fail(err, "no_memory", "no memory for positions %d to %d of a session", s->n_blocks * 64, upto);
        s->blocks[s->n_blocks++] = b;
    }
    return 0;
}
