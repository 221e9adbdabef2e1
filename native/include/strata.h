/* Strata's native library: the one public header. C callers include it; cffi reads it (strata_native/_binding.py).
 *
 * Only plain C that cffi parses: declarations, enums, integer #defines. Each concern has a section of its own.
 * Functions returning int give 0 (or a documented positive value) on success and -1 with `err` filled in. */
#ifndef STRATA_H
#define STRATA_H

#include <stddef.h>
#include <stdint.h>

#define ST_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

/* ---- errors ----------------------------------------------------------------------------------------------------- */

/* A failure as a value: a name from a fixed set (model_open, model_format, model_unsupported, no_memory, ...) and one
 * printable line of text. */
typedef struct st_error {
    char name[32];
    char text[480];
} st_error;

/* Fill `err` (may be NULL) with a name and plain text, escaped to one printable line. Returns -1. */
ST_API int st_error_set(st_error *err, const char *name, const char *text);

/* ---- hashing (BLAKE2b, RFC 7693) -------------------------------------------------------------------------------- */

#define ST_HASH_BYTES 32
#define ST_BLAKE2B_MAX_BYTES 64

/* Running state; plain data, may be copied to fork a hash. */
typedef struct st_blake2b {
    uint64_t chain[8];
    uint64_t count[2];   /* bytes compressed so far, 128 bits */
    uint8_t block[128];
    uint32_t filled;     /* bytes waiting in block */
    uint32_t digest_len;
} st_blake2b;

/* Start a digest of `digest_len` bytes (1..64), with a key of `key_len` bytes (0..64; NULL when 0).
 * Returns -1, and leaves the state unusable, when a length is out of range. */
ST_API int st_blake2b_init(st_blake2b *state, size_t digest_len, const void *key, size_t key_len);
ST_API void st_blake2b_update(st_blake2b *state, const void *data, size_t len);
/* Write digest_len bytes. The state must be started anew afterwards. */
ST_API void st_blake2b_final(st_blake2b *state, uint8_t *digest);
/* All at once; -1 when a length is out of range. */
ST_API int st_blake2b_hash(uint8_t *digest, size_t digest_len, const void *data, size_t len, const void *key,
                           size_t key_len);

/* Key of a page: BLAKE2b-256(parent key || token ids as little-endian i32). n <= 0 hashes the parent alone. */
ST_API void st_page_key(uint8_t *out, const uint8_t *parent, const int32_t *tokens, int n);
/* Parent of the first page: BLAKE2b-256("strata page root\0" || identity), the zero byte included. */
ST_API void st_root_key(uint8_t *out, const void *identity, size_t len);

/* ---- ggml types and GGUF files ---------------------------------------------------------------------------------- */

/* Element types of tensors (ids are the file format's). */
enum st_ggml_id {
    ST_GGML_F32 = 0, ST_GGML_F16 = 1, ST_GGML_Q4_0 = 2, ST_GGML_Q4_1 = 3, ST_GGML_Q5_0 = 6, ST_GGML_Q5_1 = 7,
    ST_GGML_Q8_0 = 8, ST_GGML_Q2_K = 10, ST_GGML_Q3_K = 11, ST_GGML_Q4_K = 12, ST_GGML_Q5_K = 13, ST_GGML_Q6_K = 14,
    ST_GGML_IQ2_XXS = 16, ST_GGML_IQ2_XS = 17, ST_GGML_IQ3_XXS = 18, ST_GGML_IQ1_S = 19, ST_GGML_IQ4_NL = 20,
    ST_GGML_IQ3_S = 21, ST_GGML_IQ2_S = 22, ST_GGML_IQ4_XS = 23, ST_GGML_I8 = 24, ST_GGML_I16 = 25, ST_GGML_I32 = 26,
    ST_GGML_I64 = 27, ST_GGML_F64 = 28, ST_GGML_IQ1_M = 29, ST_GGML_BF16 = 30, ST_GGML_TQ1_0 = 34, ST_GGML_TQ2_0 = 35,
    ST_GGML_MXFP4 = 39, ST_GGML_NVFP4 = 40, ST_GGML_Q1_0 = 41, ST_GGML_Q2_0 = 42
};

typedef struct st_ggml_type {
    int id;
    const char *name;
    uint32_t block_size;  /* values in a block */
    uint32_t block_bytes; /* bytes of a block */
} st_ggml_type;

ST_API int st_ggml_type_count(void);
/* Entry i of the table, in order of id; NULL when out of range. */
ST_API const st_ggml_type *st_ggml_type_at(int i);
/* The type with this id; NULL when unknown. */
ST_API const st_ggml_type *st_ggml_type_find(int id);

/* Value types of metadata (ids are the file format's). */
enum st_gguf_type {
    ST_GGUF_U8 = 0, ST_GGUF_I8 = 1, ST_GGUF_U16 = 2, ST_GGUF_I16 = 3, ST_GGUF_U32 = 4, ST_GGUF_I32 = 5, ST_GGUF_F32 = 6,
    ST_GGUF_BOOL = 7, ST_GGUF_STRING = 8, ST_GGUF_ARRAY = 9, ST_GGUF_U64 = 10, ST_GGUF_I64 = 11, ST_GGUF_F64 = 12
};

#define ST_GGUF_MAX_DIMS 4

/* An open model: one file or all parts of a split one, mapped read-only. Everything it hands out points into it and
 * dies with st_gguf_close. Reading from several threads is safe. A file that someone shortens while it is open raises
 * SIGBUS on the first touch of a page that is gone: nothing can check for that in advance. */
typedef struct st_gguf st_gguf;

/* A string inside the file: not terminated, any bytes. */
typedef struct st_gguf_str {
    const char *ptr;
    uint64_t len;
} st_gguf_str;

/* One metadata entry. A scalar reads like an array of one. */
typedef struct st_gguf_kv {
    const char *key;
    int type;              /* enum st_gguf_type; ST_GGUF_ARRAY for arrays */
    int elem_type;         /* type of the elements; of the value itself when it is no array */
    uint64_t count;        /* elements; 1 for a scalar */
    const uint8_t *data;   /* first element as stored, NOT aligned; strings are u64 length + bytes each */
    uint64_t nbytes;       /* bytes of all elements as stored */
    const uint64_t *marks; /* internal: byte offset of every 32nd string */
} st_gguf_kv;

/* One tensor. ne[0] is the contiguous dimension; unused dimensions are 1. */
typedef struct st_gguf_tensor {
    const char *name;
    int type; /* enum st_ggml_id, always one of the table */
    int n_dims;
    int64_t ne[ST_GGUF_MAX_DIMS];
    const uint8_t *data; /* absolute; aligned to the file's alignment when mapped */
    uint64_t nbytes;
    uint64_t row_bytes; /* bytes of ne[0] values */
    uint64_t offset;    /* of data in its file */
    uint32_t shard;     /* part of a split model, from 0 */
} st_gguf_tensor;

/* Open a GGUF v2 or v3 file and, when it is the first part of a split model, all other parts beside it. Every count,
 * offset, size and string is checked. Errors: model_open (file system), model_format (damaged or not GGUF),
 * model_unsupported (another version, byte order or tensor type), no_memory. */
ST_API int st_gguf_open(const char *path, st_gguf **out, st_error *err);
/* The same over memory that the caller keeps until st_gguf_close (a single file); `label` stands for the path. */
ST_API int st_gguf_open_memory(const void *data, size_t size, const char *label, st_gguf **out, st_error *err);
ST_API void st_gguf_close(st_gguf *g); /* NULL is fine */

ST_API int st_gguf_version(const st_gguf *g);       /* of the (first) file: 2 or 3 */
ST_API uint32_t st_gguf_n_shards(const st_gguf *g); /* 1 for a single file */
ST_API uint64_t st_gguf_size(const st_gguf *g);     /* bytes of all parts */

/* Metadata of the (first) file, in file order. _at: NULL when out of range; _find: NULL when absent. */
ST_API uint64_t st_gguf_n_kv(const st_gguf *g);
ST_API const st_gguf_kv *st_gguf_kv_at(const st_gguf *g, uint64_t i);
ST_API const st_gguf_kv *st_gguf_kv_find(const st_gguf *g, const char *key);
/* String i of an entry whose elem_type is string; -1 when it is not or i is out of range. */
ST_API int st_gguf_kv_str(const st_gguf_kv *kv, uint64_t i, st_gguf_str *out);

/* Typed getters. 1 = found, 0 = the key is absent (*out untouched, so preset the default), -1 = present but not
 * convertible; err (model_format) then names the key and what would be right.
 * Integers: any integer type or bool that fits. Floats: any number. Bool: bool or an integer 0 or 1. */
ST_API int st_gguf_get_u64(const st_gguf *g, const char *key, uint64_t *out, st_error *err);
ST_API int st_gguf_get_i64(const st_gguf *g, const char *key, int64_t *out, st_error *err);
ST_API int st_gguf_get_f64(const st_gguf *g, const char *key, double *out, st_error *err);
ST_API int st_gguf_get_bool(const st_gguf *g, const char *key, int *out, st_error *err);
ST_API int st_gguf_get_str(const st_gguf *g, const char *key, st_gguf_str *out, st_error *err);
/* The first n elements of an array of at least n, or a scalar n times. st_gguf_kv_find tells the count in the file. */
ST_API int st_gguf_get_array_i64(const st_gguf *g, const char *key, int64_t *out, uint64_t n, st_error *err);
ST_API int st_gguf_get_array_f64(const st_gguf *g, const char *key, double *out, uint64_t n, st_error *err);

/* Tensors of all parts, in file order. */
ST_API uint64_t st_gguf_n_tensors(const st_gguf *g);
ST_API const st_gguf_tensor *st_gguf_tensor_at(const st_gguf *g, uint64_t i);
ST_API const st_gguf_tensor *st_gguf_tensor_find(const st_gguf *g, const char *name);

/* madvise(2) over the pages of a tensor, or of `len` bytes of it from `start`. Only a hint: whole pages, so the edges
 * of neighbours are included. Without effect (0) on a model opened from memory. -1 and err when the
 * range leaves the tensor (internal) or the kernel refuses (model_open). */
ST_API int st_gguf_advise(const st_gguf *g, const st_gguf_tensor *t, int advice, st_error *err);
ST_API int st_gguf_advise_range(const st_gguf *g, const st_gguf_tensor *t, uint64_t start, uint64_t len, int advice,
                                st_error *err);

/* 32 hex digits and a NUL that name the model's content, wherever it lies (model/fingerprint.c says what is read). */
ST_API void st_gguf_fingerprint(const st_gguf *g, char *hex);

/* ---- kernels: one table of functions per instruction set (layouts: src/kernels/kernels.h) ------------------------- */

#define ST_LANES 16
#define ST_TILE 8
#define ST_TILES 8

/* Weight types that the kernels multiply, in the order of their table (src/kernels/cpu/types.c). F32 matrices stay rows
 * of floats; F16 and BF16 become Q8_0 or F32. */
#define ST_WEIGHT_TYPES 9
enum st_weight {
    ST_W_Q8_0 = 0, ST_W_Q4_0 = 1, ST_W_Q4_1 = 2, ST_W_Q5_0 = 3, ST_W_Q5_1 = 4, ST_W_IQ4_NL = 5, ST_W_Q4_K = 6,
    ST_W_Q5_K = 7, ST_W_Q6_K = 8
};

/* How an activation row is quantised, by the weights that it meets (bits of a set):
 *   32:   a scale for each 32 values; sum[k / 32] int32: the codes of each 32 added up
 *   256:  a scale for each 256 values; sum[12 * k / 256]: for each 256 values sixteen int16 sums of 16 codes, then
 *         eight int16 sums of 32 */
#define ST_FORM_32 1
#define ST_FORM_256 2

/* One row of the table of weight types. */
typedef struct st_weight_type {
    int id;                /* enum st_ggml_id */
    const char *name;
    int block;             /* values of a block: 32 or 256 */
    int block_bytes;       /* of the file's block */
    int form;              /* ST_FORM_32 or ST_FORM_256 */
    int has_min;           /* blocks carry a minimum */
    int vectors;           /* 64-byte vectors of a packed block of 16 rows */
    /* The specification: a row of the file times a quantised row of k values (arith.h). */
    float (*row)(const uint8_t *w, const int8_t *xq, const float *xd, int k);
    /* The values of one block of the file as floats. */
    void (*floats)(const uint8_t *block, float *y);
    /* n <= 16 rows of `blocks` blocks into a packed group; flip: the table's bias of Q8_0, in each byte. */
    void (*pack)(const uint8_t *rows, size_t row_bytes, int n, int blocks, uint32_t flip, uint8_t *out);
} st_weight_type;

/* Entry i (enum st_weight) of the table; NULL when out of range. */
ST_API const st_weight_type *st_weight_type_at(int i);
/* The entry of a file's type (enum st_ggml_id); -1 when the kernels do not multiply it. */
ST_API int st_weight_find(int ggml_id);

/* How a product joins what is at y. */
#define ST_STORE 0
#define ST_ADD 1
#define ST_FMA_WEIGHT 2

/* Up to ST_TILE quantised activation rows and where their products go: y[r][0..16 * groups). */
typedef struct st_tile {
    int rows;
    int row_codes; /* bytes from a code to its next form (code_bytes > 1): the values of the whole row */
    const int8_t *q[8];
    const float *d[8];
    const int32_t *sum[8];
    float *y[8];
    float weight[8]; /* ST_FMA_WEIGHT: y = fma(weight, product, y) */
    int mode;
} st_tile;

/* `groups` packed groups, `stride` bytes apart, of k values a row, times the tile (rule 3). */
typedef void (*st_mm)(const uint8_t *w, size_t stride, int groups, int k, const st_tile *tile);

/* How keys and values are held. F16 and F32 are references: plain C, slow. */
enum st_kv_type { ST_KV_INT8 = 0, ST_KV_F16 = 1, ST_KV_F32 = 2 };

/* One query head over a session's blocks of one key/value head. */
typedef struct st_attend {
    const uint8_t *const *blocks; /* block b: base of its K, V, scales (offsets below) */
    size_t offset;                /* of this layer and head inside a block */
    int hd, npos;                 /* head dimension (multiple of 4), positions attended: 0..npos-1 */
    float scale;                  /* softmax scale */
    const float *query;           /* [hd], roped */
    float *out;                   /* [hd] */
} st_attend;

typedef struct st_kernels {
    const char *isa;
    int code_bytes; /* bytes of q for each value in the form of 32: 1, or more where a table keeps other forms of the codes behind them */
    int q8_bias;    /* what the table's packed Q8_0 codes carry: 128 or 0 */
    /* One row of k values to int8 codes, scales and code sums (rule 2). q has k * code_bytes bytes, codes first. */
    void (*quantize)(const float *x, int k, int8_t *q, float *d, int32_t *sum);
    /* The same with a scale for each 256 values; q has k bytes. */
    void (*quantize256)(const float *x, int k, int8_t *q, float *d, int32_t *sum);
    st_mm mm[ST_WEIGHT_TYPES];
    /* y[i] = <w + i * k, x> for i < n (rule 4). */
    void (*dots)(const float *w, int n, int k, const float *x, float *y);
    void (*rms_norm)(const float *x, const float *w, int n, float eps, float *y);
    void (*l2_norm)(const float *x, int n, float scale, float *y); /* (x * r) * scale */
    void (*silu_mul)(const float *gate, const float *up, int n, float *y);
    void (*sigmoid_mul)(const float *x, const float *gate, int n, float *y);
    /* y = ((x * r) * w) * silu(gate): the gated norm of one recurrent head. */
    void (*norm_gate)(const float *x, const float *w, const float *gate, int n, float eps, float *y);
    /* y[c] = silu(conv of channel c): w [4][channels], rows u[0..3] oldest to newest. */
    void (*conv4_silu)(const float *w, size_t wstride, const float *const *u, int n, float *y);
    /* One token of one recurrent head (rule 7). */
    void (*delta_step)(float *S, int dk, int dv, const float *q, const float *k, const float *v, float decay,
                       float beta, float *o);
    /* One K, V or query group (<= 64 values) to int8; returns the f16 scale (rule 6). */
    uint16_t (*quantize_kv)(const float *x, int n, int8_t *q);
    void (*attend)(const st_attend *a);
    /* y = exp((x - m) * scale). */
    void (*exp_sub)(const float *x, int n, float m, float scale, float *y);
} st_kernels;

/* The table named `isa` ("scalar", "avx2", "avxvnni", "avx512", or "auto" = the best this processor has; NULL reads
 * STRATA_ISA, then auto). NULL when unknown or not supported here; *why then says which of the two and what is possible. */
ST_API const st_kernels *st_kernels_find(const char *isa, const char **why);

/* The version of the arithmetic (native/ARITHMETIC.md): part of the numeric identity and so of every page key. */
ST_API int st_arith_version(void);

/* Packing (pack.c) for a table; `type` is an enum st_weight. Bytes of one packed group; pack n (<= 16) rows of k values
 * of a row-major tensor, missing rows zero. */
ST_API size_t st_pack_group_bytes(int type, int k);
ST_API void st_pack_group(const st_kernels *table, int type, const uint8_t *rows, size_t row_bytes, int n, int k, uint8_t *out);

/* As table->mm[type], but the weights are rows as they lie in a file (16 * groups of them, row_bytes apart), for
 * n <= ST_TILES tiles at once. */
ST_API void st_mm_rows(const st_kernels *table, int type, const uint8_t *rows, size_t row_bytes, int groups, int k,
                       const st_tile *tiles, int n);

/* ---- sampling (sampling.h states the arithmetic) ---------------------------------------------------------------- */

#define ST_TOP_LOGPROBS_MAX 1024

/* Parameters of one request. st_sampling_init gives the defaults in brackets. */
typedef struct st_sampling {
    float temperature;        /* finite; <= 0 is greedy [0] */
    float top_p;              /* 0..1, 1 = off [1] */
    float min_p;              /* 0..1, 0 = off [0] */
    float penalty_repeat;     /* 0.01..100, 1 = off [1] */
    float penalty_freq;       /* -100..100 per occurrence in the output, 0 = off [0] */
    float penalty_present;    /* -100..100, 0 = off [0] */
    int32_t top_k;            /* >= 0, 0 = off [0] */
    int32_t penalty_last_n;   /* window of penalty_repeat over all ids; -1 = all, 0 = off [-1] */
    uint64_t seed;            /* [0] */
    uint32_t choice;          /* index of the answer among several to one prompt [0] */
    int32_t n_bias;           /* [0] */
    const int32_t *bias_ids;  /* n_bias ids of the vocabulary */
    const float *bias_values; /* finite, or -infinity to exclude */
    const uint32_t *mask;     /* (n_vocab + 31) / 32 words, bit set = allowed; NULL = all [NULL] */
} st_sampling;

ST_API void st_sampling_init(st_sampling *sp);
/* -1 and err bad_key (a parameter that is no number or out of range, named as in GEN lines) or token_range (a bias id
 * outside the vocabulary). */
ST_API int st_sampling_check(const st_sampling *sp, int n_vocab, st_error *err);

/* Counts of ids for the penalties of one session, kept up to date id by id. */
typedef struct st_penalty st_penalty;

/* Counts for the penalties that `sp` has on. Errors: no_memory. */
ST_API int st_penalty_new(int n_vocab, const st_sampling *sp, st_penalty **out, st_error *err);
ST_API void st_penalty_free(st_penalty *pen); /* NULL is fine */
/* Count anew: ids[0..n_total), of which the first n_prompt are the prompt. Errors: token_range, no_memory. */
ST_API int st_penalty_reset(st_penalty *pen, const int32_t *ids, int n_total, int n_prompt, st_error *err);
/* Account for one more output id, ids[n_total - 1]; everything before it is already counted. Same errors. */
ST_API int st_penalty_push(st_penalty *pen, const int32_t *ids, int n_total, st_error *err);
/* Counts of one id: in the window of penalty_repeat, and in the output. Zero for what is not on. */
ST_API void st_penalty_get(const st_penalty *pen, int32_t id, uint32_t *window, uint32_t *output);
/* Ids that have a count. */
ST_API int st_penalty_size(const st_penalty *pen);

/* Working memory of one thread for rows of n_vocab logits. Errors: no_memory, bad_range. */
typedef struct st_sampler st_sampler;

ST_API int st_sampler_new(int n_vocab, st_sampler **out, st_error *err);
ST_API void st_sampler_free(st_sampler *s); /* NULL is fine */
/* Let it use a faster function that gives the bits of st_exp_sub (st_kernels.exp_sub). */
ST_API void st_sampler_set_exp(st_sampler *s, void (*exp_sub)(const float *x, int n, float m, float scale, float *y));

/* The token for `position` (its index in prompt + output) from raw logits[n_vocab], which stay as they are. `sp` has
 * passed st_sampling_check. `pen` may be NULL when no penalty is on. Errors: non_finite, no_candidates, internal. */
ST_API int st_sample(st_sampler *s, const float *logits, const st_sampling *sp, const st_penalty *pen,
                     uint32_t position, int32_t *id, st_error *err);

/* Log-probability of `id` under the softmax of the raw logits, and the top_n (0..ST_TOP_LOGPROBS_MAX) most probable
 * ids with theirs, by logit descending then id ascending; fewer when the vocabulary is smaller. Returns how many.
 * Errors: non_finite, token_range, bad_range. */
ST_API int st_logprobs(st_sampler *s, const float *logits, int32_t id, int top_n, double *logprob, int32_t *top_ids,
                       double *top_logprobs, st_error *err);

/* One block of Philox4x32-10: counter[4], key[2] -> out[4]. */
ST_API void st_philox_block(const uint32_t *counter, const uint32_t *key, uint32_t *out);

/* y[i] = exp((x[i] - m) * scale) in the specification's scalar form. */
ST_API void st_exp_sub(const float *x, int n, float m, float scale, float *y);

/* The double functions of the host, value by value. */
enum st_math_op { ST_MATH_EXP = 0, ST_MATH_LOG = 1, ST_MATH_SIN = 2, ST_MATH_COS = 3, ST_MATH_POW = 4 };
/* y[i] = op(a[i]) or, for ST_MATH_POW, a[i]^b[i] (b is not read otherwise). Errors: bad_range (unknown op). */
ST_API int st_math_d(int op, const double *a, const double *b, int n, double *y, st_error *err);

/* ---- evaluation: logits of a token sequence, in-process (eval.c) ------------------------------------------------- */

typedef struct st_eval st_eval;

typedef struct st_eval_options {
    const char *path; /* GGUF model */
    const char *isa;  /* NULL: the best here */
    int kv;           /* enum st_kv_type */
    int threads;      /* 0: one per processor */
    int max_rows;     /* tokens of a window, 1..4096 (0: 512); any value gives the same bits */
    int mapped;       /* 1: multiply out of the mapped file, the same bits */
    int dense_as_is;  /* 1: F16 and BF16 matrices as float32, not as Q8_0 */
} st_eval_options;

/* Load a model. Errors: those of a model's loading, usage. */
ST_API int st_eval_open(const st_eval_options *options, st_eval **out, st_error *err);
ST_API void st_eval_close(st_eval *e); /* NULL is fine */
ST_API int st_eval_vocab(const st_eval *e);
ST_API int st_eval_context(const st_eval *e); /* the longest sequence */
/* Read ids[0..n) from an empty session; out[i - want_from][vocab] = logits after token i, for i in want_from..n-1.
 * Errors: context_full, token_range, bad_range, pool_full. One call at a time. */
ST_API int st_eval_logits(st_eval *e, const int32_t *ids, int n, int want_from, float *out, st_error *err);

/* ---- the line protocol's requests -------------------------------------------------------------------------------- */

enum st_command {
    ST_CMD_GEN = 0, ST_CMD_STOP = 1, ST_CMD_STAT = 2, ST_CMD_QUIT = 3, ST_CMD_BGEN = 4, ST_CMD_BSTOP = 5, ST_CMD_BYIELD = 6,
    ST_CMD_PARK = 7, ST_CMD_WANT = 8, ST_CMD_RESTORE = 9, ST_CMD_XSTOP = 10
};

/* One line, parsed; only what its command has is filled. Arrays belong to it: st_request_free. */
typedef struct st_request {
    int command; /* enum st_command, also when the rest of the line is wrong; -1: not known */
    int slot; /* -1: GEN */
    uint64_t transfer; /* 0: not a transfer's line, or a number that cannot be one */
    int tokens;        /* RESTORE: how many */
    uint8_t *bits;     /* WANT: n_bits bytes, entry i is bit i mod 8 of byte i / 8 */
    int n_bits;
    int max_new;
    float spec_min_p, spec_p_cum, spec_p_cum_deep; /* this request's draft rules; negative: the engine's */
    st_sampling sampling;
    int logprobs; /* -1: none; else alternatives per token */
    int keep;     /* ckpt: keep the session afterwards */
    int pin;
    int out_from; /* where output begins among ids; -1: behind them */
    int32_t *ids;
    int n_ids;
    int32_t *bias_ids;
    float *bias;
} st_request;

/* Parse one line (no newline). Returns the command (enum st_command), or -1 with err: bad_command, bad_key, bad_ids,
 * bad_max_new, token_range, no_memory, bad_slot, bad_transfer, no_position. GEN fills *req, which must be zeroed before; free it also after an error. */
ST_API int st_parse_line(const char *line, int n_vocab, st_request *req, st_error *err);
/* Free what the request holds and zero it. */
ST_API void st_request_free(st_request *req);

/* ---- windows: who takes part, and at what pace (src/window.h) ----------------------------------------------------- */

/* A slot as the policy sees it. */
typedef struct st_view {
    int decoding;     /* rows it wants: 1 + drafts; 0 when it does not decode */
    int reading;      /* prompt tokens left; 0 when it does not read */
    int depth;        /* position of the first of them */
    int until_cut;    /* of these, how many until the read must stop for a checkpoint */
    double waited_ms; /* since its request came in, or since it last had prompt rows */
} st_view;

/* Sums over the windows of late, older ones fading: prompt rows, and by row its depth, its ms, and their products. */
typedef struct st_pace_line {
    double n, depth, ms, depth2, depth_ms;
} st_pace_line;

/* State of the pacing between windows. */
typedef struct st_pace {
    double stall_target_ms, decode_share;
    int max_rows;     /* prompt rows of a window at most */
    int tried;        /* most prompt rows whose time is known */
    double row_ms;    /* a prompt row at position 0 */
    double deeper;    /* what each position adds to that, as a share of it */
    double decode_ms; /* a window that only decodes */
    double debt_ms;   /* decode time owed for prompt rows; below 0: decoded ahead */
    st_pace_line line;
} st_pace;

ST_API void st_pace_init(st_pace *p, int max_rows, double stall_target_ms, double decode_share);
/* Rows for each of n slots (in `rows`) of the next window. Returns the number of prompt rows among them. */
ST_API int st_window_plan(const st_pace *p, const st_view *view, int n, int *rows);
/* Account for a finished window of `ms` with that many prompt rows at the mean position `depth`, and `decoders` slots that
 * decoded. */
ST_API void st_pace_account(st_pace *p, double ms, int prompt_rows, double depth, int decoders);

/* ---- drafts: how many pay (src/speculate.h) ----------------------------------------------------------------------- */

/* Options: most drafts in a window; the least probability of a draft; the product rule (0 in base: off). */
typedef struct st_spec_rule {
    int depth;
    float min_p, cum_base, cum_deep;
    int deep_from, deep_at; /* positions between which the product threshold goes from base to deep */
} st_spec_rule;

/* Threshold of the product of draft probabilities at a position; 0 when the rule is off. */
ST_API float st_spec_threshold(const st_spec_rule *r, int position);
/* STRATA_SPEC_PCUM=base[,deep[,d0,d1]] into the rule. -1 and err (usage) when malformed. */
ST_API int st_spec_parse(const char *text, st_spec_rule *r, st_error *err);

/* Acceptance of one slot: how often draft i was right when all before it were. */
typedef struct st_acceptance {
    float right[8]; /* ST_SPEC_DEPTHS: moving averages */
    int seen[8];    /* drafts each is made of, up to a bound */
    uint64_t offered, accepted;
} st_acceptance;

/* Costs on this machine, in milliseconds. */
typedef struct st_spec_cost {
    double window_base, window_row; /* a window of r rows is roughly base + row * r */
    double draft_pass;              /* one draft step of a window */
    double scale;                   /* how slow the machine is now, as a multiple of `shape` */
    float shape[64];                /* ST_SPEC_ROWS: a window of r rows at [r - 1], mean */
    int seen[64];                   /* windows each is made of, up to a bound */
    int windows, passes;
} st_spec_cost;

ST_API void st_acceptance_init(st_acceptance *a);
/* Another text: what was learnt of the last one counts little. */
ST_API void st_acceptance_renew(st_acceptance *a);
ST_API void st_acceptance_count(st_acceptance *a, int offered, int accepted);
ST_API void st_spec_count_window(st_spec_cost *c, int rows, double ms);
ST_API void st_spec_count_drafts(st_spec_cost *c, int passes, double ms);
/* Milliseconds of a window of that many rows, as far as is known. */
ST_API double st_spec_window_ms(const st_spec_cost *c, int rows);
/* How deep each of the n (at most 65) decoding slots of a window drafts; slot i at most most[i]. */
ST_API void st_spec_depths(const st_spec_cost *c, st_acceptance *const *a, const int *most, int n, int *depth);

/* ---- checksums ---------------------------------------------------------------------------------------------------- */

/* CRC-32C of `len` bytes that follow those whose CRC is `crc` (0: none). */
ST_API uint32_t st_crc32c(uint32_t crc, const void *data, size_t len);
/* The same by tables alone, as on processors without the instruction. */
ST_API uint32_t st_crc32c_table(uint32_t crc, const void *data, size_t len);

/* ---- images (native/IMAGES.md) ------------------------------------------------------------------------------------ */

#define ST_IMAGE_PAGE 256
#define ST_MANIFEST_MOST 0x4000000 /* bytes of a manifest at most: 64 MiB */

enum st_image_kind { ST_IMAGE_MAIN = 1, ST_IMAGE_DRAFTER = 2, ST_IMAGE_TAIL = 3, ST_IMAGE_CHECKPOINT = 4 };
/* Flags of a checkpoint. */
#define ST_IMAGE_ROOT 1
#define ST_IMAGE_PINNED 2

typedef struct st_image_entry {
    int kind;      /* enum st_image_kind */
    int flags;
    int position;  /* tokens of the prefix that ends with it */
    int parent;    /* number of the main page it hangs on; -1: the root */
    uint32_t crc;  /* CRC-32C of its bytes */
    uint64_t bytes;
    uint8_t key[32];
} st_image_entry;

/* What an image of n tokens is made of. ids and entries belong to it. */
typedef struct st_manifest {
    uint8_t identity[16];
    int n, n_entries;
    int32_t *ids;
    st_image_entry *entries;
} st_manifest;

/* What decides the sizes of a model's entries, in bytes. */
typedef struct st_image_sizes {
    uint64_t block, draft_block; /* 64 positions; 0 in draft_block: no drafter */
    uint64_t checkpoint;         /* 0: the model has no checkpoints */
    int recurrent;               /* images are taken up at their checkpoints only */
} st_image_sizes;

/* Read a manifest out of untrusted bytes; everything in it is checked, the keys too. Free it. Errors: bad_image,
 * no_memory. */
ST_API int st_manifest_read(const void *data, size_t size, st_manifest **out, st_error *err);
ST_API void st_manifest_free(st_manifest *m); /* NULL is fine */
/* Its bytes, and how many they are. */
ST_API size_t st_manifest_bytes(const st_manifest *m);
ST_API void st_manifest_write(const st_manifest *m, uint8_t *out);
/* The manifest of ids[0..n), n >= 1: all pages, the tail, the drafter's as far as its rows [0, drafted) go, and
 * checkpoints at points[0..n_points), ascending. The entries' CRCs are 0. Free it. Errors: no_memory, bad_image. */
ST_API int st_manifest_make(const uint8_t *identity, const int32_t *ids, int n, int drafted, const st_image_sizes *sizes,
                            const int *points, const int *flags, int n_points, st_manifest **out, st_error *err);
/* Whether entries' sizes and token ids are those of a model. Errors: bad_image. */
ST_API int st_manifest_fits(const st_manifest *m, const st_image_sizes *sizes, int n_vocab, st_error *err);
/* What the first p tokens need: use[i] becomes 1 for each entry that must be had, 2 for those that may be had (the
 * drafter's), else 0. Errors: no_position. */
ST_API int st_manifest_choose(const st_manifest *m, const st_image_sizes *sizes, int p, uint8_t *use, st_error *err);

/* ---- memory plan (src/plan.h) ------------------------------------------------------------------------------------ */

typedef struct st_plan_in {
    uint64_t budget;        /* bytes for everything below; 0: no limit */
    uint64_t weights, buffers, prompt_cache;
    uint64_t slot_fixed;    /* bytes of a session besides its blocks */
    uint64_t block, draft_block; /* bytes of 64 positions */
    int slots;              /* wanted, 1..64 */
    int max_context;        /* positions */
} st_plan_in;

typedef struct st_plan_out {
    int slots;              /* that fit; 0: not even one */
    int blocks;             /* limit of the page pool */
    uint64_t fixed, pool, total; /* bytes: sessions besides blocks; the pool when full; everything */
} st_plan_out;

/* Fit the slots: every slot holds its fixed part; the pool must hold one whole context and one block for each slot, and
 * gets at most a whole context for each. Returns the slots that fit. */
ST_API int st_plan_memory(const st_plan_in *in, st_plan_out *out);

#ifdef __cplusplus
} /* extern C end */
#endif

#endif
