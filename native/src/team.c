#include "team.h"

#include "errors.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__)
#define RELAX() __builtin_ia32_pause()
#else
#define RELAX() atomic_signal_fence(memory_order_seq_cst)
#endif

/* Bounds of the spin before a sleep, in microseconds: less after one that was in vain, more after one that was not. Between
 * runs the caller samples and writes a token meanwhile, so that wait may be longer. A sleep costs a wake-up, in a virtual
 * machine some 50 us, so that who has slept comes late to the next barrier, where the others fall asleep over it: once all
 * sleep they would for ever. Hence every RETRY runs all begin with the longest spin again, which is soon unlearnt where
 * other programs hold the processors. */
enum { SPIN_LEAST_US = 1, SPIN_PHASE_US = 200, SPIN_START_US = 400, RETRY = 16 };

typedef struct member {
    st_team *team;
    pthread_t thread;
    int index;
    int spin_start, spin_phase; /* current budgets of this member */
} __attribute__((aligned(64))) member;

/* A word that members wait on, alone in its cache line. `sleepers` spares the wake call when nobody sleeps. */
typedef struct gate {
    _Atomic uint32_t word;
    _Atomic uint32_t sleepers;
} __attribute__((aligned(64))) gate;

struct st_team {
    gate start;                                         /* counts runs */
    gate phase;                                         /* counts barriers */
    _Atomic uint32_t arrived __attribute__((aligned(64)));
    int size;
    int quit;
    int pauses_us; /* pauses in a microsecond: 20 to 100 on processors of today */
    void (*fn)(void *, int, int);
    void *arg;
    member *members;
};

static void futex_wait(_Atomic uint32_t *word, uint32_t seen) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
}

static void gate_open(gate *g) {
    atomic_fetch_add_explicit(&g->word, 1, memory_order_seq_cst);
    if (atomic_load_explicit(&g->sleepers, memory_order_seq_cst))
        syscall(SYS_futex, &g->word, FUTEX_WAKE_PRIVATE, 1 << 30, NULL, NULL, 0);
}

static void gate_wait(gate *g, uint32_t seen, int *spin, int least, int most) {
    for (int i = 0; i < *spin; i++) {
        if (atomic_load_explicit(&g->word, memory_order_acquire) != seen) {
            if (*spin < most) *spin *= 2;
            return;
        }
        RELAX();
    }
    if (*spin > least) *spin /= 2;
    atomic_fetch_add_explicit(&g->sleepers, 1, memory_order_seq_cst);
    while (atomic_load_explicit(&g->word, memory_order_seq_cst) == seen) futex_wait(&g->word, seen);
    atomic_fetch_sub_explicit(&g->sleepers, 1, memory_order_seq_cst);
}

void st_team_barrier(st_team *t, int index) {
    if (t->size == 1) return;
    uint32_t seen = atomic_load_explicit(&t->phase.word, memory_order_acquire);
    if (atomic_fetch_add_explicit(&t->arrived, 1, memory_order_acq_rel) + 1 == (uint32_t)t->size) {
        atomic_store_explicit(&t->arrived, 0, memory_order_relaxed);
        gate_open(&t->phase);
    } else {
        gate_wait(&t->phase, seen, &t->members[index].spin_phase, SPIN_LEAST_US * t->pauses_us, SPIN_PHASE_US * t->pauses_us);
    }
}

static void spin_long(member *m) {
    m->spin_start = SPIN_START_US * m->team->pauses_us;
    m->spin_phase = SPIN_PHASE_US * m->team->pauses_us;
}

static void *member_main(void *arg) {
    member *m = arg;
    st_team *t = m->team;
    for (uint32_t seen = 0;; seen++) {
        if (seen % RETRY == 0) spin_long(m);
        gate_wait(&t->start, seen, &m->spin_start, SPIN_LEAST_US * t->pauses_us, SPIN_START_US * t->pauses_us);
        if (t->quit) return NULL;
        t->fn(t->arg, m->index, t->size);
        st_team_barrier(t, m->index);
    }
}

void st_team_run(st_team *t, void (*fn)(void *, int, int), void *arg) {
    t->fn = fn;
    t->arg = arg;
    if (t->size > 1) {
        if (atomic_load_explicit(&t->start.word, memory_order_relaxed) % RETRY == 0) spin_long(&t->members[0]);
        gate_open(&t->start);
    }
    fn(arg, 0, t->size);
    st_team_barrier(t, 0);
}

int st_team_processors(void) {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set)) return 1;
    int n = CPU_COUNT(&set);
    return n > 0 ? n : 1;
}

int st_team_size(const st_team *t) { return t->size; }

void st_team_free(st_team *t) {
    if (!t) return;
    t->quit = 1;
    if (t->size > 1) gate_open(&t->start);
    for (int i = 1; i < t->size; i++) pthread_join(t->members[i].thread, NULL);
    free(t->members);
    free(t);
}

/* Signals are for the caller's thread: members are born with all of them blocked, but for those of faults. */
static int start_thread(member *m) {
    sigset_t set, old;
    static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP};
    sigfillset(&set);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) sigdelset(&set, faults[i]);
    pthread_sigmask(SIG_SETMASK, &set, &old);
    int failed = pthread_create(&m->thread, NULL, member_main, m);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return failed;
}

/* The fastest of a few samples, so that a preemption does not count. */
static int measure_pauses(void) {
    enum { SAMPLE = 500, SAMPLES = 5 };
    double best = 1e9;
    for (int i = 0; i < SAMPLES; i++) {
        struct timespec a, b;
        clock_gettime(CLOCK_MONOTONIC, &a);
        for (int j = 0; j < SAMPLE; j++) RELAX();
        clock_gettime(CLOCK_MONOTONIC, &b);
        double us = (double)(b.tv_sec - a.tv_sec) * 1e6 + (double)(b.tv_nsec - a.tv_nsec) * 1e-3;
        if (us < best) best = us;
    }
    double rate = best > 0 ? SAMPLE / best : 1000;
    return rate < 1 ? 1 : rate > 1000 ? 1000 : (int)rate;
}

st_team *st_team_new(int n, st_error *err) {
    st_team *t = NULL;
    member *members = NULL;
    if (n < 1) n = 1;
    if (posix_memalign((void **)&t, 64, sizeof *t) || posix_memalign((void **)&members, 64, sizeof *members * (size_t)n)) {
        free(t);
        st_fail(err, "no_memory", "no memory for a team of %d threads", n);
        return NULL;
    }
    memset(t, 0, sizeof *t);
    memset(members, 0, sizeof *members * (size_t)n);
    t->members = members;
    t->size = 1;
    t->pauses_us = measure_pauses();
    for (int i = 0; i < n; i++) members[i] = (member){.team = t, .index = i};
    spin_long(&members[0]);
    for (int i = 1; i < n; i++) {
        int failed = start_thread(&members[i]);
        if (failed) {
            st_fail(err, "no_memory", "cannot start thread %d of %d: %s", i + 1, n, strerror(failed));
            st_team_free(t);
            return NULL;
        }
        t->size = i + 1;
    }
    return t;
}
