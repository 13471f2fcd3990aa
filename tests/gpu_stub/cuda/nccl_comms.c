/* Communicators of the stub of NCCL: made, split, ended, aborted.
 *
 * STUB_NCCL=1 prints their making and ending. STUB_NCCL_INIT_S: how long the ranks of one wait for
 * each other (120 s). */
#include "nccl.h"
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

typedef struct {
    char bytes[128];
} unique_id;

pthread_mutex_t nccl_mutex = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t nccl_changed = PTHREAD_COND_INITIALIZER;
int nccl_under_way;

/* Communicators of this process: those that are not over, and all that were ever made. */
static int live, made;
int stub_nccl_live(void) { return live; }
int stub_nccl_made(void) { return made; }

static int is_talking(void) { return getenv("STUB_NCCL") && *getenv("STUB_NCCL") == '1'; }
static void nap(void) { nanosleep(&(struct timespec){0, 50000}, 0); }

int nccl_must_stop(struct comm *c, int *turns) {
    if (c->is_aborted) return 1;
    nap();
    if (++*turns % 200 || c->error) return 0;
    const char *notice = getenv("STUB_NCCL_NOTICE");
    for (int r = 0; r < c->n; r++) {
        struct pollfd p = {c->watch[r], POLLIN, 0};
        int gone = c->watch[r] >= 0 && poll(&p, 1, 0) > 0;
        if ((gone || c->shared->slots[r].has_left) && !c->said_dead) {
            c->said_dead = 1;
            COMPLAIN(c, "waits for rank %d, which %s", r, gone ? "is dead" : "has left");
            if (!notice || *notice != '0') c->error = REMOTE;
        }
    }
    return 0;
}
void nccl_release(struct comm *c) {
    for (int r = 0; r < c->n; r++)
        if (c->watch[r] >= 0) close(c->watch[r]);
    munmap(c->shared, sizeof *c->shared);
    free(c);
}

/* ---- made -------------------------------------------------------------------------------------- */

static int join(struct comm **out, const char *name, int n, int rank) {
    if (n < 1 || n > RANKS || rank < 0 || rank >= n) return ARGUMENT;
    struct comm *c = calloc(1, sizeof *c);
    c->rank = rank, c->n = n;
    snprintf(c->name, sizeof c->name, "%s", name);
    int file = shm_open(name, O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, sizeof(struct shared))) return SYSTEM;
    c->shared = mmap(0, sizeof(struct shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (c->shared == MAP_FAILED) return SYSTEM;
    c->shared->slots[rank].pid = getpid();
    c->shared->joined++;
    double limit_s = getenv("STUB_NCCL_INIT_S") ? atof(getenv("STUB_NCCL_INIT_S")) : 120;
    for (double waited_s = 0; c->shared->joined < n; waited_s += 60e-6) {
        if (waited_s > limit_s)
            return COMPLAIN(c, "%d of %d ranks came", c->shared->joined, n), SYSTEM;
        nap();
    }
    shm_unlink(name);
    for (int r = 0; r < n; r++)
        c->watch[r] = r == rank ? -1 : syscall(SYS_pidfd_open, c->shared->slots[r].pid, 0);
    pthread_mutex_lock(&nccl_mutex);
    live++, made++;
    pthread_mutex_unlock(&nccl_mutex);
    if (is_talking()) COMPLAIN(c, "made, live %d", live);
    *out = c;
    return OK;
}
int ncclGetUniqueId(unique_id *u) {
    unsigned char random[12];
    memset(u, 0, sizeof *u);
    if (getentropy(random, sizeof random)) return SYSTEM;
    strcpy(u->bytes, "/stub-nccl-");
    for (int i = 0; i < 12; i++) sprintf(u->bytes + 11 + 2 * i, "%02x", random[i]);
    return OK;
}
int ncclCommInitRank(struct comm **c, int n, unique_id u, int rank) {
    return join(c, u.bytes, n, rank);
}
int ncclCommInitRankConfig(struct comm **c, int n, unique_id u, int rank, void *how) {
    return join(c, u.bytes, n, rank);
}
int ncclCommInitRankScalable(
    struct comm **c, int n, int rank, int num_ids, unique_id *u, void *how) {
    return join(c, u->bytes, n, rank);
}
int ncclCommSplit(struct comm *p, int color, int key, struct comm **c, void *how) {
    struct slot *own = &p->shared->slots[p->rank];
    uint64_t number = ++p->splits;
    /* Nobody may write anew before all have read what was there. */
    for (int phase = 0; phase < 2; phase++) {
        if (!phase) own->color = color, own->key = key;
        int n = 0, rank = 0;
        uint64_t reached = 2 * number - 1 + phase;
        own->splits = reached;
        for (int r = 0; r < p->n; r++)
            if (!WAIT(p, p->shared->slots[r].splits >= reached)) return SYSTEM;
        if (phase) break;
        for (int r = 0; r < p->n; r++) {
            struct slot *s = &p->shared->slots[r];
            if (s->color != color) continue;
            n++, rank += s->key < key || (s->key == key && r < p->rank);
        }
        char name[64];
        snprintf(name, sizeof name, "%.40s-%lu.%x", p->name, number, color);
        *c = 0;
        int error = color < 0 ? OK : join(c, name, n, rank);
        if (error) return error;
    }
    return OK;
}

/* ---- ended ------------------------------------------------------------------------------------- */

/* An abort waits, as NCCL's may for the whole device, until no message of a communicator that
 * nobody has aborted is under way. So one after the other they wait for the one that hangs. Its own
 * messages may stand behind those of another. */
static int end_comm(struct comm *c, int aborts) {
    if (!c) return OK;
    pthread_mutex_lock(&nccl_mutex);
    if (aborts) {
        if (!c->is_aborted) nccl_under_way -= c->under_way;
        c->is_aborted = 1;
        pthread_cond_broadcast(&nccl_changed);
        while (nccl_under_way) pthread_cond_wait(&nccl_changed, &nccl_mutex);
    }
    while (c->under_way && !aborts) pthread_cond_wait(&nccl_changed, &nccl_mutex);
    int is_free = !c->under_way;
    live--, c->is_over = 1, c->shared->slots[c->rank].has_left = 1;
    if (is_talking()) COMPLAIN(c, "%s, live %d", aborts ? "aborted" : "destroyed", live);
    pthread_mutex_unlock(&nccl_mutex);
    if (is_free) nccl_release(c);
    return OK;
}
int ncclCommDestroy(struct comm *c) { return end_comm(c, 0); }
int ncclCommAbort(struct comm *c) { return end_comm(c, 1); }
int ncclCommFinalize(struct comm *c) { return OK; }

/* ---- asked ------------------------------------------------------------------------------------- */

int ncclCommGetAsyncError(struct comm *c, int *e) { return *e = c->error, OK; }
int ncclCommCount(struct comm *c, int *n) { return *n = c->n, OK; }
int ncclCommUserRank(struct comm *c, int *r) { return *r = c->rank, OK; }
int ncclGetVersion(int *v) { return *v = 22907, OK; }
const char *ncclGetErrorString(int e) {
    switch (e) {
    case OK: return "no error";
    case REMOTE: return "remote process exited (stub)";
    case ARGUMENT: return "invalid argument (stub)";
    case USAGE: return "invalid usage (stub)";
    default: return "error (stub)";
    }
}
const char *ncclGetLastError(void *c) { return "stub of NCCL"; }
