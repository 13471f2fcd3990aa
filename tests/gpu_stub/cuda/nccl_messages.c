/* Messages of the stub of NCCL: collectives, send and receive, groups of them. */
#include "nccl.h"
#include <string.h>
#include <sys/uio.h>

int stub_enqueue(void *stream, void (*run)(void *), void *argument, int here);
int stub_device_of(const void *p);

static const char *const names[] = {"all-reduce", "all-gather", "reduce-scatter", "broadcast",
    "reduce", "all-to-all", "send", "recv"};

struct call {
    struct comm *comm;
    const void *from;
    void *to;
    size_t count;
    int kind, type, op, root, is_done; /* root: of a send or receive the peer */
    double scale;
    void *stream;
    struct call *next;
};
struct batch {
    struct call *calls;
};

static int read_from(struct comm *c, int r, uint64_t address, void *to, size_t n) {
    for (size_t at = 0; at < n;) {
        struct iovec here = {(char *)to + at, n - at}, there = {(void *)(address + at), n - at};
        ssize_t got = process_vm_readv(c->shared->slots[r].pid, &here, 1, &there, 1, 0);
        if (got <= 0) return WAIT(c, 0), 0; /* it died: wait for the abort */
        at += got;
    }
    return 1;
}

/* ---- collectives ------------------------------------------------------------------------------- */

/* Reduces `count` numbers of every rank, from `skip` bytes after what it offers. */
static void reduce_into(
    struct call *call, struct offer *offers, void *to, uint64_t skip, size_t count) {
    enum { PART = 1 << 13 };
    struct comm *c = call->comm;
    size_t each = nccl_size_of(call->type);
    int whole = nccl_is_whole(call->type), op = call->op;
    union number *sum = malloc(2 * PART * sizeof *sum), *one = sum + PART;
    char *part = malloc(PART * each);
    for (size_t at = 0; at < count; at += PART) {
        size_t n = count - at < PART ? count - at : PART;
        for (int r = 0; r < c->n; r++) {
            if (!read_from(c, r, offers[r].address + skip + at * each, part, n * each)) goto end;
            nccl_load(part, n, call->type, r ? one : sum);
            if (r) nccl_combine(sum, one, n, call->type, op);
        }
        for (size_t i = 0; i < n && op == 4; i++) {
            if (whole) sum[i].i /= c->n;
            else sum[i].f /= c->n;
        }
        for (size_t i = 0; i < n && call->scale != 1 && !whole; i++) sum[i].f *= call->scale;
        nccl_store(sum, n, call->type, (char *)to + at * each);
    }
end:
    free(sum), free(part);
}

static int is_same(const struct offer *a, const struct offer *b) {
    return a->kind == b->kind && a->bytes == b->bytes && a->type == b->type && a->op == b->op &&
           a->root == b->root;
}

/* Takes what all ranks offer for a collective. Returns 0 where it must end. */
static int meet(struct comm *c, uint64_t number, const struct offer *mine, struct offer *offers) {
    for (int r = 0; r < c->n; r++) {
        if (!WAIT(c, c->shared->slots[r].offered >= number)) return 0;
        offers[r] = c->shared->slots[r].offer;
        struct offer *o = &offers[r];
        if (is_same(o, mine)) continue;
        COMPLAIN(c, "message %lu: %s of %lu bytes (type %d, op %d, root %d), but rank %d has %s of "
            "%lu (%d, %d, %d)", number, names[mine->kind], mine->bytes, mine->type, mine->op,
            mine->root, r, names[o->kind], o->bytes, o->type, o->op, o->root);
        c->error = USAGE;
        WAIT(c, 0);
        return 0;
    }
    return 1;
}

static void run_collective(struct call *call) {
    struct comm *c = call->comm;
    struct slot *own = &c->shared->slots[c->rank];
    size_t bytes = call->count * nccl_size_of(call->type);
    uint64_t number = ++c->count;
    own->offer = (struct offer){
        (uint64_t)call->from, bytes, call->kind, call->type, call->op, call->root};
    own->offered = number;
    struct offer offers[RANKS];
    if (!meet(c, number, &own->offer, offers)) return;
    int from_each = call->kind == ALL_GATHER || call->kind == ALL_TO_ALL;
    size_t result = from_each ? bytes * c->n : bytes;
    int receives = call->kind != REDUCE || call->root == c->rank;
    /* Apart, since others still read what may lie where the result goes. */
    char *found = receives ? malloc(result ? result : 1) : 0;
    if (receives && bytes) switch (call->kind) {
        case ALL_REDUCE: case REDUCE:
            reduce_into(call, offers, found, 0, call->count);
            break;
        case REDUCE_SCATTER:
            reduce_into(call, offers, found, bytes * c->rank, call->count);
            break;
        case BROADCAST:
            read_from(c, call->root, offers[call->root].address, found, bytes);
            break;
        default:
            for (int r = 0; r < c->n; r++) {
                size_t skip = call->kind == ALL_TO_ALL ? c->rank * bytes : 0;
                read_from(c, r, offers[r].address + skip, found + r * bytes, bytes);
            }
        }
    own->taken = number;
    int all = 1;
    for (int r = 0; r < c->n && all; r++) all = WAIT(c, c->shared->slots[r].taken >= number);
    if (all && receives) memcpy(call->to, found, result);
    free(found);
}

/* ---- send and receive -------------------------------------------------------------------------- */

/* One look at a send or receive; 1: done. A send is done once it was received. */
static int advance(struct call *call, uint64_t number) {
    struct comm *c = call->comm;
    int peer = call->root;
    size_t bytes = call->count * nccl_size_of(call->type);
    struct slot *own = &c->shared->slots[c->rank], *other = &c->shared->slots[peer];
    if (call->kind == SEND) {
        if (own->sent[peer] < number && other->received[c->rank] == number - 1) {
            own->out[peer] = (struct offer){(uint64_t)call->from, bytes, SEND, call->type, 0, 0};
            own->sent[peer] = number;
        }
        return other->received[c->rank] >= number;
    }
    if (other->sent[c->rank] < number) return 0;
    struct offer o = other->out[c->rank];
    if (o.bytes != bytes) {
        COMPLAIN(c, "receives %lu bytes from rank %d, which sends %lu", bytes, peer, o.bytes);
        c->error = USAGE;
        WAIT(c, 0);
        return 1;
    }
    if (bytes && !read_from(c, peer, o.address, call->to, bytes)) return 1;
    own->received[peer] = number;
    return 1;
}

/* Whether a call is the next one between its two ranks, in its direction. */
static int is_first(struct batch *batch, struct call *call) {
    for (struct call *b = batch->calls; b != call; b = b->next)
        if (!b->is_done && b->comm == call->comm && b->kind == call->kind && b->root == call->root)
            return 0;
    return 1;
}

static void finish(struct batch *batch) {
    for (struct call *call = batch->calls, *next; call; call = next) {
        next = call->next;
        pthread_mutex_lock(&nccl_mutex);
        nccl_under_way -= !call->comm->is_aborted;
        int is_last = !--call->comm->under_way && call->comm->is_over;
        pthread_cond_broadcast(&nccl_changed);
        pthread_mutex_unlock(&nccl_mutex);
        if (is_last) nccl_release(call->comm);
        free(call);
    }
    free(batch);
}

/* Sends and receives of a group go on side by side, those between the same two in order. */
static void run_batch(void *argument) {
    struct batch *batch = argument;
    int turns = 0, left, moved;
    for (struct call *call = batch->calls; call; call = call->next)
        if (call->kind < SEND) run_collective(call), call->is_done = 1;
    do {
        struct call *waiting = 0;
        left = moved = 0;
        for (struct call *call = batch->calls; call; call = call->next) {
            if (call->is_done) continue;
            struct comm *c = call->comm;
            uint64_t *count = call->kind == SEND ? &c->out[call->root] : &c->in[call->root];
            if (is_first(batch, call) && advance(call, *count + 1))
                ++*count, call->is_done = moved = 1;
            else if (c->is_aborted) call->is_done = 1;
            else left = 1, waiting = waiting ? waiting : call;
        }
        if (waiting && !moved) nccl_must_stop(waiting->comm, &turns);
    } while (left);
    finish(batch);
}

/* ---- what torch calls -------------------------------------------------------------------------- */

static __thread int depth;
static __thread struct call *grouped, **end = 0;
static double scales[1024];
static int num_scales;

int ncclGroupStart(void) { return depth++, OK; }
int ncclGroupEnd(void) {
    if (--depth > 0) return OK;
    while (grouped) { /* one batch for each stream */
        struct batch *batch = calloc(1, sizeof *batch);
        struct call **to = &batch->calls, *rest = 0, **last = &rest;
        void *stream = grouped->stream;
        for (struct call *call = grouped, *next; call; call = next) {
            next = call->next, call->next = 0;
            if (call->stream == stream) *to = call, to = &call->next;
            else *last = call, last = &call->next;
        }
        grouped = rest;
        stub_enqueue(stream, run_batch, batch, 0);
    }
    return end = 0, OK;
}
static int start(struct comm *c, int kind, const void *from, void *to, size_t count, int type,
    int op, int root, void *stream) {
    if (!c || root < 0 || root >= c->n) return ARGUMENT;
    if (count && ((from && stub_device_of(from) < 0) || (to && stub_device_of(to) < 0))) {
        COMPLAIN(c, "%s of memory of the host", names[kind]);
        return ARGUMENT;
    }
    struct call *call = calloc(1, sizeof *call);
    *call = (struct call){.comm = c, .from = from, .to = to, .count = count, .kind = kind,
        .type = type, .op = op, .root = root, .scale = 1, .stream = stream};
    if (op > 4) call->op = 0, call->scale = scales[op - 5];
    pthread_mutex_lock(&nccl_mutex);
    c->under_way++, nccl_under_way += !c->is_aborted;
    pthread_mutex_unlock(&nccl_mutex);
    if (!end) end = &grouped;
    *end = call, end = &call->next;
    return depth++, ncclGroupEnd();
}
int ncclAllReduce(
    const void *from, void *to, size_t n, int type, int op, struct comm *c, void *s) {
    return start(c, ALL_REDUCE, from, to, n, type, op, 0, s);
}
int ncclReduce(
    const void *from, void *to, size_t n, int type, int op, int root, struct comm *c, void *s) {
    return start(c, REDUCE, from, c->rank == root ? to : 0, n, type, op, root, s);
}
int ncclBroadcast(
    const void *from, void *to, size_t n, int type, int root, struct comm *c, void *s) {
    return start(c, BROADCAST, c->rank == root ? from : 0, to, n, type, 0, root, s);
}
int ncclBcast(void *buffer, size_t n, int type, int root, struct comm *c, void *s) {
    return ncclBroadcast(buffer, buffer, n, type, root, c, s);
}
int ncclAllGather(const void *from, void *to, size_t n, int type, struct comm *c, void *s) {
    return start(c, ALL_GATHER, from, to, n, type, 0, 0, s);
}
int ncclReduceScatter(
    const void *from, void *to, size_t n, int type, int op, struct comm *c, void *s) {
    return start(c, REDUCE_SCATTER, from, to, n, type, op, 0, s);
}
int ncclAlltoAll(const void *from, void *to, size_t n, int type, struct comm *c, void *s) {
    return start(c, ALL_TO_ALL, from, to, n, type, 0, 0, s);
}
int ncclSend(const void *from, size_t n, int type, int peer, struct comm *c, void *s) {
    return start(c, SEND, from, 0, n, type, 0, peer, s);
}
int ncclRecv(void *to, size_t n, int type, int peer, struct comm *c, void *s) {
    return start(c, RECV, 0, to, n, type, 0, peer, s);
}
int ncclRedOpCreatePreMulSum(int *op, void *scalar, int type, int where, struct comm *c) {
    union number v;
    nccl_load(scalar, 1, type, &v);
    pthread_mutex_lock(&nccl_mutex);
    scales[num_scales % 1024] = v.f, *op = 5 + num_scales++ % 1024;
    pthread_mutex_unlock(&nccl_mutex);
    return OK;
}
int ncclRedOpDestroy(int op, struct comm *c) { return OK; }
