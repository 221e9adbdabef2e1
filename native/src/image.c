#include "image.h"

#include "errors.h"
#include "hash.h"
#include "kernels/kernels.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "fields are loaded as stored: little-endian hosts only");

enum { HEAD = 40, ENTRY = 56, CHECKSUM = 4, VERSION = 1 };
static const uint8_t MAGIC[4] = {'S', 'I', 'M', 'G'};
static const char *const KINDS[] = {"nothing", "main page", "drafter page", "tail", "checkpoint"};

/* ---- bytes ---------------------------------------------------------------------------------------------------- */

static uint32_t get(const uint8_t *p, int bytes) {
    uint32_t v = 0;
    memcpy(&v, p, (size_t)bytes);
    return v;
}

static uint64_t get64(const uint8_t *p) {
    uint64_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

static void put(uint8_t *p, uint64_t v, int bytes) { memcpy(p, &v, (size_t)bytes); }

void st_manifest_free(st_manifest *m) {
    if (!m) return;
    free(m->ids);
    free(m->entries);
    free(m);
}

static st_manifest *manifest_new(int n, int n_entries) {
    st_manifest *m = calloc(1, sizeof *m);
    if (!m) return NULL;
    m->n = n;
    m->n_entries = n_entries;
    m->ids = malloc((size_t)n * sizeof *m->ids);
    m->entries = calloc((size_t)n_entries + 1, sizeof *m->entries);
    if (m->ids && m->entries) return m;
    st_manifest_free(m);
    return NULL;
}

size_t st_manifest_bytes(const st_manifest *m) { return HEAD + (size_t)m->n * 4 + (size_t)m->n_entries * ENTRY + CHECKSUM; }

void st_manifest_write(const st_manifest *m, uint8_t *out) {
    size_t size = st_manifest_bytes(m);
    memset(out, 0, HEAD);
    memcpy(out, MAGIC, sizeof MAGIC);
    put(out + 4, VERSION, 2);
    memcpy(out + 8, m->identity, sizeof m->identity);
    put(out + 24, (uint64_t)m->n, 4);
    put(out + 28, (uint64_t)m->n_entries, 4);
    memcpy(out + HEAD, m->ids, (size_t)m->n * 4);
    uint8_t *p = out + HEAD + (size_t)m->n * 4;
    for (int i = 0; i < m->n_entries; i++, p += ENTRY) {
        const st_image_entry *e = &m->entries[i];
        put(p, (uint64_t)e->kind, 1);
        put(p + 1, (uint64_t)e->flags, 1);
        put(p + 2, 0, 2);
        put(p + 4, (uint64_t)e->position, 4);
        put(p + 8, (uint64_t)(e->parent + 1), 4);
        put(p + 12, e->crc, 4);
        put(p + 16, e->bytes, 8);
        memcpy(p + 24, e->key, sizeof e->key);
    }
    put(p, st_crc32c(0, out, size - CHECKSUM), CHECKSUM);
}

/* ---- keys ----------------------------------------------------------------------------------------------------- */

static void root_key(const uint8_t *identity, uint8_t *key) {
    char hex[33];
    for (int i = 0; i < 16; i++) snprintf(hex + 2 * i, 3, "%02x", identity[i]);
    st_root_key(key, hex, 32);
}

/* Where what an entry hangs on ends. */
static int parent_position(int kind, int position) {
    return kind == ST_IMAGE_MAIN ? position - ST_IMAGE_PAGE : position / ST_IMAGE_PAGE * ST_IMAGE_PAGE;
}

/* The key of the prefix that ends with an entry, from that of its parent. */
static void key_of(const st_manifest *m, const st_image_entry *e, const uint8_t *root, uint8_t *key) {
    const uint8_t *parent = e->parent < 0 ? root : m->entries[e->parent].key;
    int from = parent_position(e->kind, e->position);
    if (from == e->position) memcpy(key, parent, ST_HASH_BYTES);
    else st_page_key(key, parent, m->ids + from, e->position - from);
}

/* ---- reading -------------------------------------------------------------------------------------------------- */

static int bad_entry(st_error *err, int i, const char *what) { return st_fail(err, "bad_image", "entry %d of the manifest: %s", i, what); }

static int check_place(const st_manifest *m, int i, st_error *err) {
    const st_image_entry *e = &m->entries[i];
    int whole = e->position % ST_IMAGE_PAGE == 0, at = parent_position(e->kind, e->position);
    if (e->position < 1 || e->position > m->n) return bad_entry(err, i, "its position is not in the image");
    if ((e->kind == ST_IMAGE_MAIN && !whole) || (e->kind == ST_IMAGE_TAIL && (whole || e->position != m->n)) ||
        (e->kind == ST_IMAGE_DRAFTER && !whole && e->position != m->n))
        return bad_entry(err, i, "its kind cannot end at its position");
    if (at == 0) return e->parent == -1 ? 0 : bad_entry(err, i, "its parent is not the root");
    if (e->parent < 0 || e->parent >= i) return bad_entry(err, i, "its parent does not stand before it");
    if (m->entries[e->parent].kind != ST_IMAGE_MAIN || m->entries[e->parent].position != at)
        return bad_entry(err, i, "its parent is not the main page that it hangs on");
    return 0;
}

/* Fields of entry i out of its bytes. `seen` has a bit for each kind and position. */
static int read_entry(st_manifest *m, int i, const uint8_t *p, uint8_t *seen, st_error *err) {
    st_image_entry *e = &m->entries[i];
    uint32_t position = get(p + 4, 4), parent = get(p + 8, 4);
    e->kind = p[0];
    e->flags = p[1];
    if (e->kind < ST_IMAGE_MAIN || e->kind > ST_IMAGE_CHECKPOINT) return bad_entry(err, i, "its kind is not known");
    if (e->flags & ~(e->kind == ST_IMAGE_CHECKPOINT ? ST_IMAGE_ROOT | ST_IMAGE_PINNED : 0)) return bad_entry(err, i, "it has flags that are not known");
    if (get(p + 2, 2)) return bad_entry(err, i, "bytes that must be 0 are not");
    if (position > (uint32_t)m->n) return bad_entry(err, i, "its position is not in the image");
    if (parent > (uint32_t)i) return bad_entry(err, i, "its parent does not stand before it");
    e->position = (int)position;
    e->parent = (int)parent - 1;
    e->crc = get(p + 12, 4);
    e->bytes = get64(p + 16);
    memcpy(e->key, p + 24, sizeof e->key);
    if (check_place(m, i, err)) return -1;
    size_t bit = (size_t)(e->kind - 1) * ((size_t)m->n + 1) + position;
    if (seen[bit / 8] & (1u << bit % 8)) return bad_entry(err, i, "its kind is there twice at its position");
    seen[bit / 8] |= (uint8_t)(1u << bit % 8);
    return 0;
}

static int read_entries(st_manifest *m, const uint8_t *p, uint8_t *seen, st_error *err) {
    uint8_t root[ST_HASH_BYTES], key[ST_HASH_BYTES];
    root_key(m->identity, root);
    for (int i = 0; i < m->n_entries; i++, p += ENTRY) {
        if (read_entry(m, i, p, seen, err)) return -1;
        key_of(m, &m->entries[i], root, key);
        if (memcmp(key, m->entries[i].key, sizeof key)) return bad_entry(err, i, "its key is not that of its tokens");
    }
    return 0;
}

int st_manifest_read(const void *data, size_t size, st_manifest **out, st_error *err) {
    const uint8_t *p = data;
    if (size < HEAD + CHECKSUM || size > ST_MANIFEST_MOST) return st_fail(err, "bad_image", "a manifest cannot have %zu bytes", size);
    if (memcmp(p, MAGIC, sizeof MAGIC)) return st_fail(err, "bad_image", "not a manifest: it does not begin with SIMG");
    if (get(p + 4, 2) != VERSION) return st_fail(err, "bad_image", "manifest version %u; known is %d", get(p + 4, 2), VERSION);
    uint64_t n = get(p + 24, 4), e = get(p + 28, 4);
    if (n < 1 || HEAD + n * 4 + e * ENTRY + CHECKSUM != size)
        return st_fail(err, "bad_image", "a manifest of %llu tokens and %llu entries does not have %zu bytes", (unsigned long long)n, (unsigned long long)e, size);
    if (get(p + size - CHECKSUM, 4) != st_crc32c(0, p, size - CHECKSUM)) return st_fail(err, "bad_image", "the checksum of the manifest is wrong");
    if (get(p + 6, 2) || get64(p + 32)) return st_fail(err, "bad_image", "bytes of the manifest's head that must be 0 are not");
    st_manifest *m = manifest_new((int)n, (int)e);
    uint8_t *seen = calloc((n + 1) * ST_IMAGE_CHECKPOINT / 8 + 1, 1);
    int failed = m && seen ? 0 : st_fail(err, "no_memory", "no memory for a manifest of %llu tokens", (unsigned long long)n);
    if (!failed) {
        memcpy(m->identity, p + 8, sizeof m->identity);
        memcpy(m->ids, p + HEAD, n * 4);
        failed = read_entries(m, p + HEAD + n * 4, seen, err);
    }
    free(seen);
    if (failed) st_manifest_free(m);
    else *out = m;
    return failed;
}

/* ---- making --------------------------------------------------------------------------------------------------- */

static uint64_t bytes_of(const st_image_sizes *s, int kind, int position) {
    int part = position % ST_IMAGE_PAGE;
    uint64_t blocks = part ? (uint64_t)(part + 63) / 64 : ST_IMAGE_PAGE / 64;
    return kind == ST_IMAGE_CHECKPOINT ? s->checkpoint : blocks * (kind == ST_IMAGE_DRAFTER ? s->draft_block : s->block);
}

typedef struct maker {
    st_manifest *m;
    const st_image_sizes *sizes;
    uint8_t root[ST_HASH_BYTES];
    int page; /* the last main page; -1: none */
} maker;

static void add(maker *k, int kind, int position, int flags) {
    st_image_entry *e = &k->m->entries[k->m->n_entries];
    *e = (st_image_entry){.kind = kind, .flags = flags, .position = position, .parent = k->page, .bytes = bytes_of(k->sizes, kind, position)};
    key_of(k->m, e, k->root, e->key);
    if (kind == ST_IMAGE_MAIN) k->page = k->m->n_entries;
    k->m->n_entries++;
}

int st_manifest_make(const uint8_t *identity, const int32_t *ids, int n, int drafted, const st_image_sizes *sizes,
                     const int *points, const int *flags, int n_points, st_manifest **out, st_error *err) {
    int pages = n / ST_IMAGE_PAGE, tail = n % ST_IMAGE_PAGE, at = 0, drafts = sizes->draft_block > 0;
    maker k = {.m = manifest_new(n, 2 * (pages + 1) + n_points), .sizes = sizes, .page = -1};
    if (!k.m) return st_fail(err, "no_memory", "no memory for a manifest of %d tokens", n);
    k.m->n_entries = 0;
    memcpy(k.m->identity, identity, sizeof k.m->identity);
    memcpy(k.m->ids, ids, (size_t)n * sizeof *ids);
    root_key(identity, k.root);
    for (int page = 0; page <= pages; page++) {
        int end = page * ST_IMAGE_PAGE;
        if (page) add(&k, ST_IMAGE_MAIN, end, 0);
        if (page && drafts && drafted >= end) add(&k, ST_IMAGE_DRAFTER, end, 0);
        for (; at < n_points && points[at] < end + ST_IMAGE_PAGE; at++) add(&k, ST_IMAGE_CHECKPOINT, points[at], flags[at]);
    }
    if (tail) add(&k, ST_IMAGE_TAIL, n, 0);
    if (tail && drafts && drafted >= n) add(&k, ST_IMAGE_DRAFTER, n, 0);
    if (st_manifest_bytes(k.m) > ST_MANIFEST_MOST) {
        st_manifest_free(k.m);
        return st_fail(err, "bad_image", "%d tokens are too many for a manifest", n);
    }
    *out = k.m;
    return 0;
}

/* ---- for a model ---------------------------------------------------------------------------------------------- */

int st_manifest_fits(const st_manifest *m, const st_image_sizes *sizes, int n_vocab, st_error *err) {
    for (int i = 0; i < m->n; i++)
        if (m->ids[i] < 0 || m->ids[i] >= n_vocab)
            return st_fail(err, "bad_image", "token %d of the manifest, %u, is outside the vocabulary of %d", i, (unsigned)m->ids[i], n_vocab);
    for (int i = 0; i < m->n_entries; i++) {
        const st_image_entry *e = &m->entries[i];
        uint64_t bytes = bytes_of(sizes, e->kind, e->position);
        if (!bytes) return st_fail(err, "bad_image", "entry %d of the manifest is a %s, which this model does not have", i, KINDS[e->kind]);
        if (e->bytes != bytes)
            return st_fail(err, "bad_image", "entry %d of the manifest, a %s, has %llu bytes and not %llu", i, KINDS[e->kind], (unsigned long long)e->bytes,
                           (unsigned long long)bytes);
    }
    return 0;
}

/* Whether an entry holds keys and values that the first p tokens need. */
static int covers(const st_image_entry *e, int p) {
    int first = (e->position - 1) / ST_IMAGE_PAGE * ST_IMAGE_PAGE;
    return first < p && (e->position % ST_IMAGE_PAGE == 0 || e->position >= p);
}

/* The drafter's rows are of use up to the first that is missing. Without memory to tell, it does without. */
static void choose_drafter(const st_manifest *m, int p, uint8_t *use) {
    int pages = (p - 1) / ST_IMAGE_PAGE + 1, there = 0;
    uint8_t *has = calloc((size_t)pages + 1, 1);
    if (!has) return;
    for (int i = 0; i < m->n_entries; i++)
        if (m->entries[i].kind == ST_IMAGE_DRAFTER && covers(&m->entries[i], p)) has[(m->entries[i].position - 1) / ST_IMAGE_PAGE] = 1;
    while (has[there]) there++;
    free(has);
    for (int i = 0; i < m->n_entries; i++)
        if (m->entries[i].kind == ST_IMAGE_DRAFTER && covers(&m->entries[i], p) && (m->entries[i].position - 1) / ST_IMAGE_PAGE < there) use[i] = 2;
}

int st_manifest_choose(const st_manifest *m, const st_image_sizes *sizes, int p, uint8_t *use, st_error *err) {
    int main = 0, state = 0;
    memset(use, 0, (size_t)m->n_entries);
    if (p < 1 || p > m->n) return st_fail(err, "no_position", "the image has %d tokens; %d of them cannot be taken", m->n, p);
    for (int i = 0; i < m->n_entries; i++) {
        const st_image_entry *e = &m->entries[i];
        if (e->kind == ST_IMAGE_CHECKPOINT && e->position == p) use[i] = sizes->recurrent ? 1 : 2, state = 1;
        else if ((e->kind == ST_IMAGE_MAIN || e->kind == ST_IMAGE_TAIL) && covers(e, p)) use[i] = 1, main++;
    }
    if (main < (p + ST_IMAGE_PAGE - 1) / ST_IMAGE_PAGE) return st_fail(err, "no_position", "the image lacks pages before token %d", p);
    if (sizes->recurrent && !state) return st_fail(err, "no_position", "the image has no checkpoint at token %d", p);
    choose_drafter(m, p, use);
    return 0;
}

void st_image_sizes_of(const st_shape *shape, st_image_sizes *sizes) {
    size_t states = (shape->state_floats + shape->conv_floats) * (size_t)shape->recurrent_layers, hidden = shape->drafter ? (size_t)shape->n_embd : 0;
    *sizes = (st_image_sizes){.block = st_block_bytes(shape), .draft_block = st_draft_block_bytes(shape), .checkpoint = (states + hidden) * sizeof(float),
                              .recurrent = shape->recurrent_layers > 0};
}

/* ---- an entry's bytes ----------------------------------------------------------------------------------------- */

static int block_pieces(uint8_t *const *blocks, int n_blocks, size_t bytes, int position, st_piece *pieces) {
    int first = (position - 1) / ST_IMAGE_PAGE * ST_IMAGE_PIECES, end = (position + 63) / 64;
    for (int b = first; b < end; b++) {
        int keep = position - b * 64;
        pieces[b - first] = (st_piece){b < n_blocks ? blocks[b] : NULL, bytes, keep < 64 ? keep : 64};
    }
    return end - first;
}

static int point_pieces(const st_image *image, int position, st_piece *pieces) {
    const st_shape *s = &image->shape;
    const st_image_point *at = NULL;
    int n = 0;
    for (int i = 0; i < image->n_points; i++)
        if (image->points[i].n == position) at = &image->points[i];
    if (!at) return 0;
    if (s->recurrent_layers) {
        pieces[n++] = (st_piece){(uint8_t *)at->states, s->state_floats * (size_t)s->recurrent_layers * sizeof(float), 0};
        pieces[n++] = (st_piece){(uint8_t *)at->convs, s->conv_floats * (size_t)s->recurrent_layers * sizeof(float), 0};
    }
    if (s->drafter) pieces[n++] = (st_piece){(uint8_t *)at->hidden, (size_t)s->n_embd * sizeof(float), 0};
    return n;
}

int st_image_pieces(const st_image *image, const st_image_entry *e, st_piece *pieces) {
    if (e->kind == ST_IMAGE_CHECKPOINT) return point_pieces(image, e->position, pieces);
    if (e->kind == ST_IMAGE_DRAFTER)
        return block_pieces(image->draft_blocks, image->n_draft_blocks, st_draft_block_bytes(&image->shape), e->position, pieces);
    return block_pieces(image->blocks, image->n_blocks, st_block_bytes(&image->shape), e->position, pieces);
}

const uint8_t *st_piece_bytes(const st_image *image, const st_piece *piece, uint8_t *scratch) {
    const st_shape *s = &image->shape;
    size_t head = st_kv_bytes(s->kv, s->head_dim);
    if (!piece->keep || piece->keep == 64) return piece->at;
    memcpy(scratch, piece->at, piece->bytes);
    for (size_t at = 0; at < piece->bytes; at += head) st_kv_clear(s->kv, s->head_dim, piece->keep, scratch + at);
    return scratch;
}
