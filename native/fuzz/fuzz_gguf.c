/* Fuzz target of the GGUF reader: any bytes must give a named error or a model whose every fact can be read.
 *
 * libFuzzer: clang -fsanitize=fuzzer,address,undefined fuzz_gguf.c <the reader's sources>. With gcc: `make` here. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "strata.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* What must hold whatever the input is. */
static void require(int holds, const char *what) {
    if (holds) return;
    fprintf(stderr, "fuzz_gguf: broken promise: %s\n", what);
    abort();
}

static void check_error(const st_error *err) {
    static const char *const names[] = {"model_open", "model_format", "model_unsupported", "no_memory"};
    int known = 0;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) known |= strcmp(err->name, names[i]) == 0;
    require(known, "the error's name is one of the table");
    require(err->text[0] != 0, "the error says something");
    for (const char *p = err->text; *p; p++) require((unsigned char)*p >= 0x20 && *p != 0x7f, "the text is one line");
}

static void read_kv(const st_gguf *g, const st_gguf_kv *kv, const uint8_t *data, size_t size) {
    st_gguf_str text;
    uint64_t u;
    int64_t many[3];
    double d;
    int b;
    st_error err;
    require(kv->data >= data && kv->nbytes <= size && (size_t)(kv->data - data) <= size - kv->nbytes,
            "a value is inside");
    require(st_gguf_kv_find(g, kv->key) == kv, "a key is found by its name");
    for (uint64_t i = 0; kv->elem_type == ST_GGUF_STRING && i < kv->count; i += 1 + i / 100) {
        require(st_gguf_kv_str(kv, i, &text) == 0, "a string can be read");
        require(text.len <= kv->nbytes, "a string is inside");
        if (text.len) u = (uint64_t)text.ptr[0] + (uint64_t)text.ptr[text.len - 1];
    }
    require(st_gguf_kv_str(kv, kv->count, &text) < 0, "a string past the end is refused");
    require(st_gguf_get_u64(g, kv->key, &u, &err) != 0 && st_gguf_get_f64(g, kv->key, &d, &err) != 0 &&
                st_gguf_get_bool(g, kv->key, &b, &err) != 0 && st_gguf_get_str(g, kv->key, &text, &err) != 0 &&
                st_gguf_get_i64(g, kv->key, many, &err) != 0 && st_gguf_get_array_i64(g, kv->key, many, 3, &err) != 0,
            "a getter finds the key");
}

static uint64_t read_tensor(const st_gguf *g, const st_gguf_tensor *t, const uint8_t *data, size_t size) {
    st_error err;
    require(t->nbytes > 0 && t->offset <= size && t->nbytes <= size - t->offset, "a tensor is inside");
    require(t->data == data + t->offset, "a tensor's address is its offset");
    require(st_gguf_tensor_find(g, t->name) == t, "a tensor is found by its name");
    require(st_ggml_type_find(t->type) != NULL, "a tensor's type is known");
    require(t->row_bytes * (uint64_t)(t->ne[1] * t->ne[2] * t->ne[3]) == t->nbytes, "a tensor is made of rows");
    require(st_gguf_advise(g, t, 0, &err) == 0, "advice is taken");
    return t->nbytes;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    st_gguf *g = NULL;
    st_error err = {{0}, {0}};
    char hex[33];
    if (st_gguf_open_memory(data, size, "input", &g, &err) < 0) {
        require(g == NULL, "no model beside an error");
        check_error(&err);
        return 0;
    }
    uint64_t sum = 0;
    for (uint64_t i = 0; i < st_gguf_n_kv(g); i++) read_kv(g, st_gguf_kv_at(g, i), data, size);
    for (uint64_t i = 0; i < st_gguf_n_tensors(g); i++) sum += read_tensor(g, st_gguf_tensor_at(g, i), data, size);
    require(sum <= size, "the tensors together are not larger than the file");
    st_gguf_fingerprint(g, hex);
    require(strlen(hex) == 32, "the fingerprint has 32 digits");
    st_gguf_close(g);
    return 0;
}
