/* Rows of activations as the kernels read them, and the products over them that every architecture is made of. */
#ifndef ST_ACT_H
#define ST_ACT_H

#include "model/weights.h"

/* Codes, scales and code sums of rows in one form (ST_FORM_32, ST_FORM_256). */
typedef struct st_codes {
    int8_t *q;
    float *d;
    int32_t *sum;
} st_codes;

/* `rows` rows of k values: floats, and once quantised also the forms that their matrices want. */
typedef struct st_act {
    int k;
    int forms;          /* bits: ST_FORM_32, ST_FORM_256 */
    float *x;           /* [rows][k] */
    st_codes c32, c256;
} st_act;

/* Room for `rows` rows in these forms, in one allocation (a->x first); -1 when there is no memory. Free a->x. */
int st_act_new(const st_kernels *t, st_act *a, int rows, int k, int forms);
void st_act_quantize(const st_kernels *t, st_act *a, int row);

/* Groups [g0, g1) of a matrix times `rows` input rows, into columns 16 * g0 ... of y (row stride ystride floats).
 * in_row, out_row name the rows (NULL: 0, 1, 2 ...); weight belongs to ST_FMA_WEIGHT, one for each row. */
typedef struct st_product {
    const st_mat *m;
    int expert, g0, g1;
    const st_act *in;
    const int *in_row, *out_row;
    int rows;
    float *y;
    size_t ystride;
    int mode;
    const float *weight;
} st_product;

void st_product_run(const st_kernels *t, const st_product *p);

#endif
