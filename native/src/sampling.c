/* Sampling and log-probabilities; the definition is in sampling.h. */
#include "sampling.h"

#include <float.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "arith.h"
#include "errors.h"
#include "math_d.h"
#include "philox.h"

enum {
    BLOCK = 64, /* ids under one maximum */
    WORD = 32,  /* ids in a word of the mask */
    MAX_VOCAB = 1 << 26
};

/* A candidate in sorting form: the key falls as the logit rises. */
typedef struct cand {
    uint32_t key;
    uint32_t id;
} cand;

struct st_sampler {
    int n, n_blocks;
    void (*exp_sub)(const float *x, int n, float m, float scale, float *y);

    const float *logits; /* of this call: raw, or adj once something changed them */
    float *adj;          /* [n] penalties, bias and mask applied; excluded = -infinity */
    float *block_max;    /* [n_blocks] of logits */
    float max;

    /* The sorted prefix, grown by grow(). */
    cand *sorted;      /* [n] */
    cand *spare;       /* [n] of the sort */
    float *value;      /* [n] logits in sorted order */
    float *weight;     /* [n] st_exp of them, at whichever temperature the caller is */
    float *thresholds; /* [n_blocks] block maxima, descending */
    int n_sorted, stage;
    float floor; /* every logit >= floor is in the sorted prefix */
};

/* ---- parameters ------------------------------------------------------------------------------------------------- */

void st_sampling_init(st_sampling *sp) {
    *sp = (st_sampling){.top_p = 1.0f, .penalty_repeat = 1.0f, .penalty_last_n = -1};
}

int st_sampling_check(const st_sampling *sp, int n_vocab, st_error *err) {
    const struct {
        const char *name;
        float value, low, high;
    } ranges[] = {
        {"temperature", sp->temperature, -FLT_MAX, FLT_MAX}, {"top_p", sp->top_p, 0.0f, 1.0f},
        {"min_p", sp->min_p, 0.0f, 1.0f},                    {"penalty_repeat", sp->penalty_repeat, 0.01f, 100.0f},
        {"penalty_freq", sp->penalty_freq, -100.0f, 100.0f}, {"penalty_present", sp->penalty_present, -100.0f, 100.0f},
    };
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++) {
        if (ranges[i].value >= ranges[i].low && ranges[i].value <= ranges[i].high) continue;
        if (ranges[i].high == FLT_MAX) return st_fail(err, "bad_key", "%s must be a finite number", ranges[i].name);
        return st_fail(err, "bad_key", "%s must be a number from %g to %g", ranges[i].name, (double)ranges[i].low,
                       (double)ranges[i].high);
    }
    if (sp->top_k < 0) return st_fail(err, "bad_key", "top_k must be 0 (off) or more, it is %d", sp->top_k);
    if (sp->penalty_last_n < -1)
        return st_fail(err, "bad_key", "penalty_last_n must be -1 (all) or more, it is %d", sp->penalty_last_n);
    if (sp->n_bias < 0 || (sp->n_bias > 0 && (!sp->bias_ids || !sp->bias_values)))
        return st_fail(err, "bad_key", "logit_bias must be a list of id:bias pairs");
    for (int i = 0; i < sp->n_bias; i++) {
        int32_t id = sp->bias_ids[i];
        float value = sp->bias_values[i];
        if (id < 0 || id >= n_vocab)
            return st_fail(err, "token_range", "logit_bias: id %d is outside the vocabulary of %d", id, n_vocab);
        if (!(value <= FLT_MAX))
            return st_fail(err, "bad_key", "logit_bias of id %d must be a finite number or -inf", id);
    }
    return 0;
}

static bool repeat_on(const st_sampling *sp) { return sp->penalty_repeat != 1.0f && sp->penalty_last_n != 0; }
static bool output_on(const st_sampling *sp) { return sp->penalty_freq != 0.0f || sp->penalty_present != 0.0f; }

/* ---- counts for the penalties ----------------------------------------------------------------------------------- */

typedef struct pen_entry {
    int32_t id;
    uint32_t window, output;
} pen_entry;

/* Only ids with a count have an entry, so applying costs what the window and the output hold, not what they ever held.
 * Which place an entry has depends on the history; nothing that is computed from them does. */
struct st_penalty {
    int n_vocab, last_n; /* last_n: -1 all, 0 the window is not tracked */
    bool output;
    uint32_t *place; /* [n_vocab] 1 + place in entries, 0 = none */
    pen_entry *entries;
    int n_entries, capacity;
};

int st_penalty_new(int n_vocab, const st_sampling *sp, st_penalty **out, st_error *err) {
    *out = NULL;
    if (n_vocab < 1 || n_vocab > MAX_VOCAB) return st_fail(err, "bad_range", "a vocabulary of %d ids", n_vocab);
    st_penalty *pen = calloc(1, sizeof *pen);
    uint32_t *place = calloc((size_t)n_vocab, sizeof *place);
    if (!pen || !place) {
        free(pen);
        free(place);
        return st_fail(err, "no_memory", "no memory for penalty counts of %d ids", n_vocab);
    }
    *pen = (st_penalty){.n_vocab = n_vocab, .output = output_on(sp), .place = place};
    pen->last_n = repeat_on(sp) ? sp->penalty_last_n : 0;
    *out = pen;
    return 0;
}

void st_penalty_free(st_penalty *pen) {
    if (!pen) return;
    free(pen->place);
    free(pen->entries);
    free(pen);
}

/* The entry of an id, made when absent; NULL without memory. */
static pen_entry *pen_entry_of(st_penalty *pen, int32_t id) {
    if (pen->place[id]) return &pen->entries[pen->place[id] - 1];
    if (pen->n_entries == pen->capacity) {
        int capacity = pen->capacity ? 2 * pen->capacity : 64;
        pen_entry *more = realloc(pen->entries, (size_t)capacity * sizeof *more);
        if (!more) return NULL;
        pen->entries = more;
        pen->capacity = capacity;
    }
    pen->entries[pen->n_entries] = (pen_entry){.id = id};
    pen->place[id] = (uint32_t)++pen->n_entries;
    return &pen->entries[pen->n_entries - 1];
}

/* Drop an entry without counts: the last one takes its place. */
static void pen_prune(st_penalty *pen, int32_t id) {
    uint32_t at = pen->place[id] - 1;
    if (pen->entries[at].window || pen->entries[at].output) return;
    pen->entries[at] = pen->entries[--pen->n_entries];
    pen->place[pen->entries[at].id] = at + 1;
    pen->place[id] = 0;
}

/* Count ids[at]; what it pushes out of the window no longer counts. */
static int pen_count(st_penalty *pen, const int32_t *ids, int at, bool output, st_error *err) {
    int32_t id = ids[at];
    if (id < 0 || id >= pen->n_vocab)
        return st_fail(err, "token_range", "id %d at position %d is outside the vocabulary of %d", id, at,
                       pen->n_vocab);
    bool in_window = pen->last_n != 0, in_output = output && pen->output;
    if (in_window || in_output) {
        pen_entry *e = pen_entry_of(pen, id);
        if (!e) return st_fail(err, "no_memory", "no memory for penalty counts");
        e->window += in_window;
        e->output += in_output;
    }
    if (pen->last_n > 0 && at >= pen->last_n) {
        int32_t left = ids[at - pen->last_n];
        if (left < 0 || left >= pen->n_vocab || !pen->place[left])
            return st_fail(err, "internal", "position %d was never counted for the penalties", at - pen->last_n);
        pen->entries[pen->place[left] - 1].window--;
        pen_prune(pen, left);
    }
    return 0;
}

int st_penalty_reset(st_penalty *pen, const int32_t *ids, int n_total, int n_prompt, st_error *err) {
    for (int i = 0; i < pen->n_entries; i++) pen->place[pen->entries[i].id] = 0;
    pen->n_entries = 0;
    for (int i = 0; i < n_total; i++)
        if (pen_count(pen, ids, i, i >= n_prompt, err)) return -1;
    return 0;
}

int st_penalty_push(st_penalty *pen, const int32_t *ids, int n_total, st_error *err) {
    return pen_count(pen, ids, n_total - 1, true, err);
}

void st_penalty_get(const st_penalty *pen, int32_t id, uint32_t *window, uint32_t *output) {
    *window = *output = 0;
    if (id < 0 || id >= pen->n_vocab || !pen->place[id]) return;
    *window = pen->entries[pen->place[id] - 1].window;
    *output = pen->entries[pen->place[id] - 1].output;
}

int st_penalty_size(const st_penalty *pen) { return pen->n_entries; }

/* ---- the sampler's memory --------------------------------------------------------------------------------------- */

void st_exp_sub(const float *x, int n, float m, float scale, float *y) {
    for (int i = 0; i < n; i++) y[i] = st_exp((x[i] - m) * scale);
}

int st_sampler_new(int n_vocab, st_sampler **out, st_error *err) {
    *out = NULL;
    if (n_vocab < 1 || n_vocab > MAX_VOCAB) return st_fail(err, "bad_range", "a vocabulary of %d ids", n_vocab);
    st_sampler *s = calloc(1, sizeof *s);
    if (!s) return st_fail(err, "no_memory", "no memory for sampling");
    size_t n = (size_t)n_vocab, blocks = (n + BLOCK - 1) / BLOCK;
    s->n = n_vocab;
    s->n_blocks = (int)blocks;
    s->exp_sub = st_exp_sub;
    s->adj = malloc(n * sizeof *s->adj);
    s->block_max = malloc(blocks * sizeof *s->block_max);
    s->sorted = malloc(n * sizeof *s->sorted);
    s->spare = malloc(n * sizeof *s->spare);
    s->value = malloc(n * sizeof *s->value);
    s->weight = malloc(n * sizeof *s->weight);
    s->thresholds = malloc(blocks * sizeof *s->thresholds);
    if (!s->adj || !s->block_max || !s->sorted || !s->spare || !s->value || !s->weight || !s->thresholds) {
        st_sampler_free(s);
        return st_fail(err, "no_memory", "no memory for sampling from %d ids", n_vocab);
    }
    *out = s;
    return 0;
}

void st_sampler_free(st_sampler *s) {
    if (!s) return;
    free(s->adj);
    free(s->block_max);
    free(s->sorted);
    free(s->spare);
    free(s->value);
    free(s->weight);
    free(s->thresholds);
    free(s);
}

void st_sampler_set_exp(st_sampler *s, void (*exp_sub)(const float *x, int n, float m, float scale, float *y)) {
    s->exp_sub = exp_sub;
}

/* ---- one pass over the row -------------------------------------------------------------------------------------- */

/* Four floats at a time, as every target has them: left to themselves, compilers do not see the maximum. */
typedef float f4 __attribute__((vector_size(16)));
typedef int32_t i4 __attribute__((vector_size(16)));

static inline f4 load4(const float *x) {
    f4 v;
    memcpy(&v, x, sizeof v);
    return v;
}

static inline f4 max4(f4 a, f4 b) {
    i4 above = a > b;
    return (f4)(((i4)a & above) | ((i4)b & ~above));
}

/* Maximum of a whole block. *odd becomes NaN when a value is not finite and keeps its value otherwise. */
static inline float whole_block_max(const float *x, float *odd) {
    f4 top[4], zero[4];
    for (int j = 0; j < 4; j++) {
        top[j] = load4(x + 4 * j);
        zero[j] = top[j] * 0.0f;
    }
    for (int k = 16; k < BLOCK; k += 16)
        for (int j = 0; j < 4; j++) {
            f4 v = load4(x + k + 4 * j);
            top[j] = max4(v, top[j]);
            zero[j] += v * 0.0f;
        }
    f4 t = max4(max4(top[0], top[1]), max4(top[2], top[3])), z = (zero[0] + zero[1]) + (zero[2] + zero[3]);
    *odd += (z[0] + z[1]) + (z[2] + z[3]);
    float a = t[0] > t[1] ? t[0] : t[1], b = t[2] > t[3] ? t[2] : t[3];
    return a > b ? a : b;
}

static float block_max(const float *x, int n, float *odd) {
    if (n == BLOCK) return whole_block_max(x, odd);
    float top = x[0];
    for (int i = 0; i < n; i++) {
        top = x[i] > top ? x[i] : top;
        *odd += x[i] * 0.0f;
    }
    return top;
}

static int block_len(const st_sampler *s, int b) { return s->n - b * BLOCK < BLOCK ? s->n - b * BLOCK : BLOCK; }

/* Look at a row of raw logits: block maxima, and whether all is finite. */
static int scan(st_sampler *s, const float *logits, st_error *err) {
    float odd = 0.0f;
    for (int b = 0; b < s->n_blocks; b++)
        s->block_max[b] = block_max(logits + b * BLOCK, block_len(s, b), &odd);
    if (odd != 0.0f) return st_fail(err, "non_finite", "the model gave logits that are not finite");
    s->logits = logits;
    return 0;
}

static void refresh_block(st_sampler *s, int b) {
    float ignored = 0.0f;
    s->block_max[b] = block_max(s->adj + b * BLOCK, block_len(s, b), &ignored);
}

static int adjust(st_sampler *s, int32_t id, float value, const char *by, st_error *err) {
    if (!(value >= -FLT_MAX && value <= FLT_MAX))
        return st_fail(err, "non_finite", "%s makes the logit of id %d overflow", by, id);
    s->adj[id] = value;
    refresh_block(s, id / BLOCK);
    return 0;
}

static int apply_penalties(st_sampler *s, const st_sampling *sp, const st_penalty *pen, st_error *err) {
    bool repeat = repeat_on(sp), output = output_on(sp);
    for (int i = 0; i < pen->n_entries; i++) {
        const pen_entry *e = &pen->entries[i];
        float l = s->adj[e->id];
        if (repeat && e->window) l = l > 0.0f ? l / sp->penalty_repeat : l * sp->penalty_repeat;
        if (output && e->output) l -= (float)e->output * sp->penalty_freq + sp->penalty_present;
        if (adjust(s, e->id, l, "a penalty", err)) return -1;
    }
    return 0;
}

static int apply_bias(st_sampler *s, const st_sampling *sp, st_error *err) {
    for (int i = 0; i < sp->n_bias; i++) {
        int32_t id = sp->bias_ids[i];
        if (id < 0 || id >= s->n) return st_fail(err, "token_range", "logit_bias: id %d is outside the vocabulary", id);
        if (s->adj[id] == -INFINITY) continue;
        if (sp->bias_values[i] == -INFINITY) {
            s->adj[id] = -INFINITY;
            refresh_block(s, id / BLOCK);
        } else if (adjust(s, id, s->adj[id] + sp->bias_values[i], "logit_bias", err)) {
            return -1;
        }
    }
    return 0;
}

static void apply_mask(st_sampler *s, const uint32_t *mask) {
    for (int b = 0; b < s->n_blocks; b++) {
        bool changed = false;
        for (int i = b * BLOCK, end = i + block_len(s, b); i < end; i += WORD) {
            uint32_t word = mask[i / WORD];
            if (word == UINT32_MAX) continue;
            for (int j = 0; j < WORD && i + j < end; j++)
                if (!(word >> j & 1u)) s->adj[i + j] = -INFINITY;
            changed = true;
        }
        if (changed) refresh_block(s, b);
    }
}

/* Steps 0 to 3; afterwards logits, block_max and max are those of the candidates. */
static int prepare(st_sampler *s, const float *logits, const st_sampling *sp, const st_penalty *pen, st_error *err) {
    if (scan(s, logits, err)) return -1;
    bool penalties = repeat_on(sp) || output_on(sp);
    if (penalties && !pen) return st_fail(err, "internal", "a penalty is on, but no ids were counted for it");
    if ((penalties && pen->n_entries) || sp->n_bias || sp->mask) {
        memcpy(s->adj, logits, (size_t)s->n * sizeof *s->adj);
        s->logits = s->adj;
        if (penalties && apply_penalties(s, sp, pen, err)) return -1;
        if (apply_bias(s, sp, err)) return -1;
        if (sp->mask) apply_mask(s, sp->mask);
    }
    s->max = s->block_max[0];
    for (int b = 1; b < s->n_blocks; b++) s->max = s->block_max[b] > s->max ? s->block_max[b] : s->max;
    if (s->max == -INFINITY) return st_fail(err, "no_candidates", "the mask and logit_bias exclude every token");
    return 0;
}

/* The first candidate: the lowest id that has the maximum. */
static int32_t first_candidate(const st_sampler *s) {
    int b = 0;
    while (s->block_max[b] != s->max) b++;
    int i = b * BLOCK;
    while (s->logits[i] != s->max) i++;
    return i;
}

/* ---- the sorted prefix ------------------------------------------------------------------------------------------ */

/* Unsigned order of keys = descending order of floats, -0 like +0 (adding 0 makes it so). */
static uint32_t sort_key(float l) {
    uint32_t u = st_f2bits(l + 0.0f);
    return u & 0x80000000u ? u : ~(u | 0x80000000u);
}

static void insertion_sort(cand *a, int n) {
    for (int i = 1; i < n; i++) {
        cand x = a[i];
        int j = i;
        for (; j > 0 && a[j - 1].key > x.key; j--) a[j] = a[j - 1];
        a[j] = x;
    }
}

/* Stable sort by key: candidates gathered by ascending id stay so among equals. Byte by byte; bytes that all keys
 * share cost only their count. */
static void sort_cands(cand *a, cand *spare, int n) {
    if (n <= BLOCK) {
        insertion_sort(a, n);
        return;
    }
    uint32_t count[4][256] = {{0}};
    for (int i = 0; i < n; i++)
        for (int d = 0; d < 4; d++) count[d][a[i].key >> (8 * d) & 255u]++;
    cand *from = a, *to = spare;
    for (int d = 0; d < 4; d++) {
        uint32_t *start = count[d], sum = 0;
        if (start[a[0].key >> (8 * d) & 255u] == (uint32_t)n) continue;
        for (int v = 0; v < 256; v++) {
            uint32_t c = start[v];
            start[v] = sum;
            sum += c;
        }
        for (int i = 0; i < n; i++) to[start[from[i].key >> (8 * d) & 255u]++] = from[i];
        cand *swap = from;
        from = to;
        to = swap;
    }
    if (from != a) memcpy(a, from, (size_t)n * sizeof *a);
}

static void start_prefix(st_sampler *s) {
    s->n_sorted = s->stage = 0;
    s->floor = INFINITY;
}

/* Block maxima in descending order: the k-th has at least k logits at or above it. */
static void sort_thresholds(st_sampler *s) {
    for (int b = 0; b < s->n_blocks; b++) s->sorted[b] = (cand){sort_key(s->block_max[b]), (uint32_t)b};
    sort_cands(s->sorted, s->spare, s->n_blocks);
    for (int b = 0; b < s->n_blocks; b++) s->thresholds[b] = s->block_max[s->sorted[b].id];
}

/* Add the candidates in [low, s->floor) to the sorted prefix, which then holds all candidates >= low. */
static void take_from(st_sampler *s, float low) {
    int from = s->n_sorted, n = from;
    for (int b = 0; b < s->n_blocks; b++) {
        if (!(s->block_max[b] >= low)) continue;
        for (int i = b * BLOCK, end = i + block_len(s, b); i < end; i++) {
            float l = s->logits[i];
            if (l >= low && l < s->floor) s->sorted[n++] = (cand){sort_key(l), (uint32_t)i};
        }
    }
    sort_cands(s->sorted + from, s->spare, n - from);
    for (int i = from; i < n; i++) s->value[i] = s->logits[s->sorted[i].id];
    s->n_sorted = n;
    s->floor = low;
}

/* Where the sorted prefix ends next: by rank among the block maxima, then by steps of one nat, then at the end. */
static float next_floor(const st_sampler *s) {
    static const int ranks[] = {64, 512, MAX_VOCAB};
    enum { RANKS = sizeof ranks / sizeof *ranks, STEPS = RANKS + 4 };
    if (s->stage < RANKS) return s->thresholds[(ranks[s->stage] < s->n_blocks ? ranks[s->stage] : s->n_blocks) - 1];
    return s->stage < STEPS ? s->floor - 1.0f : -FLT_MAX;
}

/* Make the sorted prefix longer; false when it holds every candidate. */
static bool grow(st_sampler *s) {
    if (s->stage == 0) sort_thresholds(s);
    for (int before = s->n_sorted; s->n_sorted == before; s->stage++) {
        if (s->floor == -FLT_MAX) return false; /* the excluded are -infinity */
        float low = next_floor(s);
        take_from(s, low > -FLT_MAX ? low : -FLT_MAX);
    }
    return true;
}

/* Sort at least k candidates, or all there are; returns how many of the first k exist. */
static int grow_to(st_sampler *s, int k) {
    while (s->n_sorted < k && grow(s)) {}
    return s->n_sorted < k ? s->n_sorted : k;
}

/* ---- the draw --------------------------------------------------------------------------------------------------- */

/* Sum of st_exp((l - m) * scale) over the row in rule 5 order. */
static double row_sum(const st_sampler *s, float scale) {
    float total = 0.0f, y[ST_SUMCHUNK];
    for (int c = 0; c < s->n; c += ST_SUMCHUNK) {
        int n = s->n - c < ST_SUMCHUNK ? s->n - c : ST_SUMCHUNK, i = 0;
        s->exp_sub(s->logits + c, n, s->max, scale, y);
        f4 four[ST_STRIDE / 4] = {{0}};
        for (; i + ST_STRIDE <= n; i += ST_STRIDE)
            for (int j = 0; j < ST_STRIDE / 4; j++) four[j] += load4(y + i + 4 * j);
        float part[ST_STRIDE];
        memcpy(part, four, sizeof part);
        for (int j = 0; i + j < n; j++) part[j] += y[i + j];
        total += st_tree32(part);
    }
    return (double)total;
}

static void weigh(st_sampler *s, int from, int to, float scale) {
    if (to > from) s->exp_sub(s->value + from, to - from, s->max, scale, s->weight + from);
}

static double weight_sum(const st_sampler *s, int n) {
    double sum = 0.0;
    for (int i = 0; i < n; i++) sum += (double)s->weight[i];
    return sum;
}

static bool top_k_active(const st_sampler *s, const st_sampling *sp) { return sp->top_k > 0 && sp->top_k < s->n; }

/* Step 5: how many candidates of the sorted prefix (grown as needed) are kept. */
static int keep(st_sampler *s, const st_sampling *sp) {
    int limit = s->n, weighed = 0, kept = 0;
    double goal = INFINITY, sum = 0.0;
    if (top_k_active(s, sp)) weigh(s, 0, weighed = limit = grow_to(s, sp->top_k), 1.0f);
    if (sp->top_p < 1.0f)
        goal = (double)sp->top_p * (top_k_active(s, sp) ? weight_sum(s, limit) : row_sum(s, 1.0f));
    else if (!(sp->min_p > 0.0f))
        return limit; /* top_k alone */
    while (kept < limit && sum < goal) {
        if (kept == weighed) {
            if (kept == s->n_sorted && !grow(s)) break;
            weigh(s, weighed, s->n_sorted, 1.0f);
            weighed = s->n_sorted;
        }
        if (kept > 0 && s->weight[kept] < sp->min_p) break;
        sum += (double)s->weight[kept++];
    }
    return kept ? kept : 1;
}

/* Step 7 over the first `kept` candidates; weights below `weighed` are in place. */
static int32_t walk(st_sampler *s, int kept, int weighed, float scale, double goal) {
    double sum = 0.0;
    uint32_t last = s->sorted[0].id;
    for (int i = 0; i < kept; i++) {
        if (i == weighed) {
            if (i == s->n_sorted && !grow(s)) break;
            weigh(s, weighed, s->n_sorted, scale);
            weighed = s->n_sorted;
        }
        if (s->weight[i] > 0.0f) last = s->sorted[i].id;
        sum += (double)s->weight[i];
        if (sum > goal) break;
    }
    return (int32_t)last;
}

static int32_t draw(st_sampler *s, const st_sampling *sp, double u) {
    float scale = 1.0f / sp->temperature;
    if (scale > FLT_MAX) scale = FLT_MAX;
    start_prefix(s);
    grow(s);
    if (!top_k_active(s, sp) && sp->top_p >= 1.0f && !(sp->min_p > 0.0f))
        return walk(s, s->n, 0, scale, u * row_sum(s, scale));
    int kept = keep(s, sp);
    weigh(s, 0, kept, scale);
    return walk(s, kept, kept, scale, u * weight_sum(s, kept));
}

int st_sample(st_sampler *s, const float *logits, const st_sampling *sp, const st_penalty *pen, uint32_t position,
              int32_t *id, st_error *err) {
    if (prepare(s, logits, sp, pen, err)) return -1;
    if (!(sp->temperature > 0.0f) || sp->top_k == 1)
        *id = first_candidate(s);
    else
        *id = draw(s, sp, st_philox_uniform(sp->seed, position, ST_DRAW_TOKEN, sp->choice));
    return 0;
}

/* ---- log-probabilities ------------------------------------------------------------------------------------------ */

int st_logprobs(st_sampler *s, const float *logits, int32_t id, int top_n, double *logprob, int32_t *top_ids,
                double *top_logprobs, st_error *err) {
    if (id < 0 || id >= s->n) return st_fail(err, "token_range", "id %d is outside the vocabulary of %d", id, s->n);
    if (top_n < 0 || top_n > ST_TOP_LOGPROBS_MAX)
        return st_fail(err, "bad_range", "logprobs must be from 0 to %d, it is %d", ST_TOP_LOGPROBS_MAX, top_n);
    st_sampling plain;
    st_sampling_init(&plain);
    if (prepare(s, logits, &plain, NULL, err)) return -1;
    double max = (double)s->max, log_z = st_log_d(row_sum(s, 1.0f));
    *logprob = ((double)logits[id] - max) - log_z;
    start_prefix(s);
    top_n = grow_to(s, top_n);
    for (int i = 0; i < top_n; i++) {
        top_ids[i] = (int32_t)s->sorted[i].id;
        top_logprobs[i] = ((double)s->value[i] - max) - log_z;
    }
    return top_n;
}

/* ---- for other languages ---------------------------------------------------------------------------------------- */

void st_philox_block(const uint32_t *counter, const uint32_t *key, uint32_t *out) { st_philox4x32(counter, key, out); }

int st_math_d(int op, const double *a, const double *b, int n, double *y, st_error *err) {
    if (op < ST_MATH_EXP || op > ST_MATH_POW) return st_fail(err, "bad_range", "no function has the number %d", op);
    for (int i = 0; i < n; i++) {
        double sine = 0.0, cosine = 0.0;
        switch (op) {
        case ST_MATH_EXP: y[i] = st_exp_d(a[i]); break;
        case ST_MATH_LOG: y[i] = st_log_d(a[i]); break;
        case ST_MATH_POW: y[i] = st_pow_d(a[i], b[i]); break;
        default:
            st_sincos_d(a[i], &sine, &cosine);
            y[i] = op == ST_MATH_SIN ? sine : cosine;
        }
    }
    return 0;
}
