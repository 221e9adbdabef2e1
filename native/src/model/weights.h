/* Weights in memory: matrices packed for the kernels, vectors as float32. Everything comes from a checked GGUF and
 * is owned by one st_weights, so that a failed load frees what it had. */
#ifndef ST_WEIGHTS_H
#define ST_WEIGHTS_H

#include "strata.h"

/* How a matrix lies in memory. */
enum st_storage {
    ST_PACKED, /* groups of 16 rows, packed for the kernels */
    ST_MAPPED, /* rows in the mapped file, packed a piece at a time for each product: slower, no memory of its own */
    ST_FLOATS  /* rows of float32 */
};

/* A matrix [n outputs][k inputs], or `experts` of them behind each other. n is a multiple of 16. */
typedef struct st_mat {
    int type;    /* enum st_weight; of no meaning for ST_FLOATS */
    int storage; /* enum st_storage */
    int form;    /* of the activations that it meets: ST_FORM_32, ST_FORM_256, or 0 for floats */
    int n, k, experts;
    size_t group_bytes; /* of 16 rows */
    const uint8_t *data;
} st_mat;

/* What is chosen when a model is opened. */
typedef struct st_weights_how {
    int mapped;      /* multiply out of the mapped file where its types allow; F16 and BF16 are always converted */
    int dense_as_is; /* hold F16 and BF16 matrices as float32, not as Q8_0: other bits, slow, a reference */
} st_weights_how;

typedef struct st_weights st_weights;

/* Matrices are packed for `table`; the file's pages are given back as their rows are packed. `progress` (may be NULL)
 * hears the share of tensor bytes that are loaded, 0..100, rising. */
st_weights *st_weights_new(const st_gguf *g, const st_kernels *table, st_weights_how how, void (*progress)(void *arg, int percent),
                           void *arg, st_error *err);
void st_weights_free(st_weights *w);
/* All is loaded: give back what the kernel mapped around what was read (it maps more than is asked for). */
void st_weights_settle(const st_weights *w);
/* Bytes held in memory. */
size_t st_weights_bytes(const st_weights *w);

/* 1 when the file has the tensor. */
int st_weights_has(const st_weights *w, const char *name);

/* Load tensor `name`; experts 0 = a plain matrix. Errors name the tensor, its shape or type, and what would be right. */
int st_weights_mat(st_weights *w, const char *name, int k, int n, int experts, st_mat *out, st_error *err);

/* Forms (ST_FORM_32 | ST_FORM_256) that the matrices of k inputs loaded so far want their activations in. */
int st_weights_forms(const st_weights *w, int k);

/* The same as `rows` x `k` float32 values (row-major), from any type that is read: vectors have rows = 1. A vector
 * stored as [k, 1] is accepted. Values must be finite. */
int st_weights_f32(st_weights *w, const char *name, int k, int rows, float **out, st_error *err);

/* Room for n floats, zero, freed with the weights: for tables that a model makes of its tensors. */
float *st_weights_room(st_weights *w, size_t n, st_error *err);

/* 1 when values of the tensor's type can be read at all; -1 and err (model_unsupported) that names those that can. */
int st_gguf_row_readable(const st_gguf_tensor *t);
int st_gguf_refuse_type(const st_gguf_tensor *t, st_error *err);
/* Row `row` of a plain matrix that is kept as it is in the file (embeddings), as float32. */
void st_gguf_row_f32(const st_gguf_tensor *t, int64_t row, float *out);

#endif
