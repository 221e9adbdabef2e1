/* Weights in memory: matrices packed for the kernels, vectors as float32. Everything comes from a checked GGUF and
 * is owned by one st_weights, so that a failed load frees what it had. */
#ifndef ST_WEIGHTS_H
#define ST_WEIGHTS_H

#include "strata.h"

/* A matrix [n outputs][k inputs], or `experts` of them behind each other. n is a multiple of 16. */
typedef struct st_mat {
    int type; /* ST_GGML_Q8_0 or ST_GGML_Q4_0: packed groups; ST_GGML_F32: rows */
    int n, k, experts;
    size_t group_bytes; /* of 16 rows */
    const uint8_t *data;
} st_mat;

typedef struct st_weights st_weights;

/* Matrices are packed for `table`. `progress` (may be NULL) hears the share of tensor bytes that are loaded, 0..100, rising. */
st_weights *st_weights_new(const st_gguf *g, const st_kernels *table, void (*progress)(void *arg, int percent), void *arg, st_error *err);
void st_weights_free(st_weights *w);
/* Bytes held in memory. */
size_t st_weights_bytes(const st_weights *w);

/* 1 when the file has the tensor. */
int st_weights_has(const st_weights *w, const char *name);

/* Load tensor `name`; experts 0 = a plain matrix. Errors name the tensor, its shape or type, and what would be right. */
int st_weights_mat(st_weights *w, const char *name, int k, int n, int experts, st_mat *out, st_error *err);

/* The same as `rows` x `k` float32 values (row-major), from F32, F16, BF16 or Q8_0: vectors have rows = 1. A vector
 * stored as [k, 1] is accepted. Values must be finite. */
int st_weights_f32(st_weights *w, const char *name, int k, int rows, float **out, st_error *err);

/* Room for n floats, zero, freed with the weights: for tables that a model makes of its tensors. */
float *st_weights_room(st_weights *w, size_t n, st_error *err);

/* Row `row` of a plain matrix that is kept as it is in the file (embeddings), as float32. */
void st_gguf_row_f32(const st_gguf_tensor *t, int64_t row, float *out);

#endif
