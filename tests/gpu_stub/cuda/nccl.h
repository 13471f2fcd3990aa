/* NCCL between processes of one machine: real values, no GPU. All of it lies in libnccl.so.2.
 *
 * A communicator is a file of shared memory with a slot for each rank. For a message a rank writes
 * into its slot what it offers (address, bytes, kind) and counts up; the others read its memory
 * (process_vm_readv), since the "device's" memory is memory of the process. Messages run on the
 * thread of their stream, so that the caller goes on as with a GPU.
 *
 * As with NCCL a message that waits for a dead rank never ends by itself. The communicator's
 * asynchronous error tells it after some milliseconds (STUB_NCCL_NOTICE=0: never, as over NVLink).
 * ncclCommAbort ends it, and leaves the result unwritten. Unlike NCCL the stub tells mistakes:
 * other sizes, kinds or roots on other ranks, memory of the host. */
#ifndef STUB_NCCL_H
#define STUB_NCCL_H
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define RANKS 64

/* ncclResult_t, as far as it is used. */
enum { OK = 0, SYSTEM = 2, ARGUMENT = 4, USAGE = 5, REMOTE = 6 };
enum kind {
    ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, REDUCE, ALL_TO_ALL, SEND, RECV
};

struct offer {
    uint64_t address, bytes;
    int32_t kind, type, op, root;
};
struct slot {
    int32_t pid, has_left;
    _Atomic uint64_t offered, taken; /* collectives that this rank has offered, and is done with */
    struct offer offer;
    _Atomic uint64_t sent[RANKS], received[RANKS]; /* messages to each rank, and from each */
    struct offer out[RANKS];
    _Atomic uint64_t splits;
    int32_t color, key;
};
struct shared {
    _Atomic int32_t joined;
    struct slot slots[RANKS];
};
struct comm {
    int rank, n, error, is_aborted, under_way, is_over;
    uint64_t count, splits, out[RANKS], in[RANKS];
    struct shared *shared;
    int watch[RANKS]; /* descriptors that tell the end of a process */
    char name[64], said_dead;
};

#define COMPLAIN(c, ...)                                                                           \
    (fprintf(stderr, "[stub nccl] rank %d of %d (%s): ", (c)->rank, (c)->n, (c)->name),            \
        fprintf(stderr, __VA_ARGS__), fputc('\n', stderr))

extern pthread_mutex_t nccl_mutex;
extern pthread_cond_t nccl_changed;
/* Messages of all communicators of this process that nobody has aborted. */
extern int nccl_under_way;

/* Once in a while: has a rank died? Returns whether to give up. */
int nccl_must_stop(struct comm *c, int *turns);
/* Whether the condition came true; else the communicator was aborted. */
#define WAIT(c, condition)                                                                         \
    ({                                                                                             \
        int turns_ = 0, stop_ = 0;                                                                 \
        while (!(condition) && !(stop_ = nccl_must_stop(c, &turns_)))                              \
            ;                                                                                      \
        !stop_;                                                                                    \
    })
/* Gives back a communicator that is over and has no message under way. */
void nccl_release(struct comm *c);

/* A number of any of NCCL's types; whole ones in `i`. */
union number {
    double f;
    int64_t i;
};
size_t nccl_size_of(int type);
int nccl_is_whole(int type);
/* `n` numbers of a type as numbers, and back. */
void nccl_load(const void *p, size_t n, int type, union number *to);
void nccl_store(const union number *from, size_t n, int type, void *p);
/* op: 0 sum, 1 product, 2 largest, 3 least, 4 mean (whose division comes later) */
void nccl_combine(union number *sum, const union number *with, size_t n, int type, int op);
#endif
