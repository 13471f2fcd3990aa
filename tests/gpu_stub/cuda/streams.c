/* Streams and events of the stub.
 *
 * A stream whose queue is empty runs what it is given at once, in the caller. Once NCCL has put a
 * message on it, what follows waits in a queue that a thread of the stream works off. So a message
 * that never arrives blocks what a GPU would block: later copies of the stream, streams and events
 * that wait for it, cudaFree, cudaDeviceSynchronize. */
#include "runtime.h"
#include <time.h>

pthread_mutex_t stub_mutex = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t stub_changed = PTHREAD_COND_INITIALIZER;
__thread int stub_device = 0;
_Atomic unsigned long stub_counts[COUNTS];
unsigned long stub_count(int what) { return stub_counts[what]; }

/* ---- streams ---------------------------------------------------------------------------------- */

struct work {
    void (*run)(void *);
    void *argument;
    struct work *next;
};
struct stream {
    struct work *head, *tail; /* the head is what runs */
    int has_thread;
    struct stream *next; /* of all streams of this process */
};
static struct stream defaults[DEVICES], *streams;

/* 0, 1 and 2 name the default streams, which count as one. */
struct stream *stub_stream_of(void *handle) {
    return (unsigned long)handle < 3 ? &defaults[stub_device % DEVICES] : (struct stream *)handle;
}
int stub_is_idle(struct stream *stream) { return !stream->head; }

static void *work_off(void *argument) {
    struct stream *stream = argument;
    pthread_mutex_lock(&stub_mutex);
    for (;;) {
        while (!stream->head) pthread_cond_wait(&stub_changed, &stub_mutex);
        struct work *work = stream->head;
        pthread_mutex_unlock(&stub_mutex);
        work->run(work->argument);
        pthread_mutex_lock(&stub_mutex);
        stream->head = work->next;
        if (!stream->head) stream->tail = 0;
        free(work);
        pthread_cond_broadcast(&stub_changed);
    }
    return 0;
}

int stub_enqueue(void *handle, void (*run)(void *), void *argument, int here) {
    struct stream *stream = stub_stream_of(handle);
    pthread_mutex_lock(&stub_mutex);
    if (here && !stream->head) {
        pthread_mutex_unlock(&stub_mutex);
        run(argument);
        return 1;
    }
    struct work *work = calloc(1, sizeof *work);
    work->run = run, work->argument = argument;
    if (stream->tail) stream->tail->next = work;
    else stream->head = work;
    stream->tail = work;
    if (!stream->has_thread) {
        pthread_t thread;
        stream->has_thread = 1;
        pthread_create(&thread, 0, work_off, stream);
        pthread_detach(thread);
    }
    pthread_cond_broadcast(&stub_changed);
    pthread_mutex_unlock(&stub_mutex);
    return 0;
}

void stub_wait_for(struct stream *stream) {
    pthread_mutex_lock(&stub_mutex);
    while (stream->head) pthread_cond_wait(&stub_changed, &stub_mutex);
    pthread_mutex_unlock(&stub_mutex);
}
void stub_wait_for_all(void) {
    for (int i = 0; i < DEVICES; i++) stub_wait_for(&defaults[i]);
    for (struct stream *s = streams; s; s = s->next) stub_wait_for(s);
}
/* A wait that is not counted, of the Python side of the stub. */
void stub_wait(void *handle) { stub_wait_for(stub_stream_of(handle)); }

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority) {
    struct stream *stream = calloc(1, sizeof *stream);
    pthread_mutex_lock(&stub_mutex);
    stream->next = streams, streams = stream;
    pthread_mutex_unlock(&stub_mutex);
    *s = (cudaStream_t)stream;
    return 0;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags) {
    return cudaStreamCreateWithPriority(s, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t *s) { return cudaStreamCreateWithPriority(s, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t s) { return 0; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *l, int *h) { return *l = 0, *h = -5, 0; }
cudaError_t cudaStreamGetPriority(cudaStream_t s, int *p) { return *p = 0, 0; }
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *c) {
    return *c = 0, 0;
}
cudaError_t cudaStreamQuery(cudaStream_t s) {
    return stub_is_idle(stub_stream_of(s)) ? 0 : cudaErrorNotReady;
}
cudaError_t cudaStreamSynchronize(cudaStream_t s) {
    stub_counts[SYNCS]++;
    stub_wait_for(stub_stream_of(s));
    return 0;
}
cudaError_t cudaDeviceSynchronize(void) {
    stub_counts[SYNCS]++;
    stub_wait_for_all();
    return 0;
}

/* ---- functions of the host --------------------------------------------------------------------- */

struct host_call {
    cudaHostFn_t function;
    cudaStreamCallback_t callback;
    void *argument;
};
static void call_host(void *argument) {
    struct host_call *c = argument;
    if (c->function) c->function(c->argument);
    else c->callback(0, 0, c->argument);
    free(c);
}
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t function, void *argument) {
    struct host_call *c = calloc(1, sizeof *c);
    c->function = function, c->argument = argument;
    stub_enqueue(s, call_host, c, 1);
    return 0;
}
cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void *a, unsigned flags) {
    struct host_call *c = calloc(1, sizeof *c);
    c->callback = f, c->argument = a;
    stub_enqueue(s, call_host, c, 1);
    return 0;
}

/* ---- events: recorded the nth time, reached the nth time --------------------------------------- */

struct event {
    struct timespec at;
    unsigned long wanted, reached;
    struct event *next; /* among those that may be used again */
};
struct point {
    struct event *event;
    unsigned long number;
};
static struct event *spare;

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) {
    pthread_mutex_lock(&stub_mutex);
    struct event *event = spare;
    if (event) spare = event->next;
    else event = calloc(1, sizeof *event);
    pthread_mutex_unlock(&stub_mutex);
    *e = (cudaEvent_t)event;
    return 0;
}
cudaError_t cudaEventCreate(cudaEvent_t *e) { return cudaEventCreateWithFlags(e, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t e) { /* never freed: a stream may be about to reach it */
    struct event *event = (struct event *)e;
    pthread_mutex_lock(&stub_mutex);
    event->next = spare, spare = event;
    pthread_mutex_unlock(&stub_mutex);
    return 0;
}
static struct point *point_of(struct event *event, int is_new) {
    struct point *point = malloc(sizeof *point);
    pthread_mutex_lock(&stub_mutex);
    point->event = event, point->number = event->wanted += is_new;
    pthread_mutex_unlock(&stub_mutex);
    return point;
}
static void reach(void *argument) {
    struct point *point = argument;
    pthread_mutex_lock(&stub_mutex);
    clock_gettime(CLOCK_MONOTONIC, &point->event->at);
    if (point->event->reached < point->number) point->event->reached = point->number;
    pthread_cond_broadcast(&stub_changed);
    pthread_mutex_unlock(&stub_mutex);
    free(point);
}
static void await(void *argument) {
    struct point *point = argument;
    pthread_mutex_lock(&stub_mutex);
    while (point->event->reached < point->number) pthread_cond_wait(&stub_changed, &stub_mutex);
    pthread_mutex_unlock(&stub_mutex);
    free(point);
}
static int is_reached(struct event *event) { return event->reached >= event->wanted; }

cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
    stub_enqueue(s, reach, point_of((struct event *)e, 1), 1);
    return 0;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned flags) {
    return cudaEventRecord(e, s);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags) {
    if (!is_reached((struct event *)e)) stub_enqueue(s, await, point_of((struct event *)e, 0), 0);
    return 0;
}
cudaError_t cudaEventQuery(cudaEvent_t e) {
    return is_reached((struct event *)e) ? 0 : cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t e) {
    stub_counts[SYNCS]++;
    await(point_of((struct event *)e, 0));
    return 0;
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) {
    struct event *x = (void *)a, *y = (void *)b;
    *ms = (y->at.tv_sec - x->at.tv_sec) * 1e3 + (y->at.tv_nsec - x->at.tv_nsec) * 1e-6;
    return 0;
}
