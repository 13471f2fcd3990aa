/* Memory of the stub: pages of the host that are zero until touched, counted for each device, so
 * that torch's caching allocator runs out of memory as on a GPU. Copies move real bytes, in the
 * order of their stream. */
#include "runtime.h"
#include <string.h>
#include <sys/mman.h>

#define PIECE (2ul << 20)
#define PAGE 4096ul
/* What a context of CUDA takes, about. */
#define CONTEXT (600ul << 20)

struct block {
    char *start;
    size_t size;
    int device;
    struct block *next;
};
static struct block *blocks, *pinned_blocks;
static size_t used[DEVICES];

static void add(struct block **list, char *start, size_t size, int device) {
    struct block *block = malloc(sizeof *block);
    block->start = start, block->size = size, block->device = device;
    pthread_mutex_lock(&stub_mutex);
    block->next = *list, *list = block;
    pthread_mutex_unlock(&stub_mutex);
}
/* With the lock held: takes a block out of a list; 0: there is none. */
static struct block *take(struct block **list, void *start) {
    while (*list && (*list)->start != start) list = &(*list)->next;
    struct block *found = *list;
    if (found) *list = found->next;
    return found;
}
/* The device of the block that holds an address; -1: no block of this list. */
static int find(struct block **list, const void *p) {
    int found = -1;
    pthread_mutex_lock(&stub_mutex);
    for (struct block *b = *list; b && found < 0; b = b->next)
        if ((char *)p >= b->start && (char *)p < b->start + b->size) found = b->device;
    pthread_mutex_unlock(&stub_mutex);
    return found;
}
int stub_device_of(const void *p) { return find(&blocks, p); }
/* Counts bytes of a device; 0: it has not so many left. */
int stub_take_bytes(int device, size_t n) {
    pthread_mutex_lock(&stub_mutex);
    int fits = CONTEXT + used[device] + n <= stub_device_bytes();
    if (fits) used[device] += n;
    pthread_mutex_unlock(&stub_mutex);
    return fits;
}
void stub_give_bytes(int device, size_t n) {
    pthread_mutex_lock(&stub_mutex);
    used[device] -= n;
    pthread_mutex_unlock(&stub_mutex);
}
/* Places in a range of addresses, for `stub_device_of`. */
void stub_add_block(char *start, size_t n, int device) { add(&blocks, start, n, device); }
void stub_take_block(void *start) {
    pthread_mutex_lock(&stub_mutex);
    struct block *block = take(&blocks, start);
    pthread_mutex_unlock(&stub_mutex);
    free(block);
}
static int is_pinned(const void *p) { return find(&pinned_blocks, p) >= 0; }

/* ---- allocations ------------------------------------------------------------------------------- */

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    size_t held = CONTEXT + used[stub_device];
    *total = stub_device_bytes();
    *free_bytes = held < *total ? *total - held : 0;
    return 0;
}
cudaError_t cudaMalloc(void **p, size_t n) {
    n = UP(n ? n : 1, PIECE);
    if (!stub_take_bytes(stub_device, n)) return cudaErrorMemoryAllocation;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    char *whole = mmap(0, n + PIECE, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (whole == MAP_FAILED) return cudaErrorMemoryAllocation;
    char *start = (char *)UP((unsigned long)whole, PIECE);
    if (start > whole) munmap(whole, start - whole);
    munmap(start + n, whole + PIECE - start);
    /* Few pages are ever touched: large ones would cost real memory. */
    madvise(start, n, MADV_NOHUGEPAGE);
    add(&blocks, start, n, stub_device);
    *p = start;
    return 0;
}
cudaError_t cudaFree(void *p) { /* waits for the whole device, as CUDA does */
    if (!p) return 0;
    stub_wait_for_all();
    pthread_mutex_lock(&stub_mutex);
    struct block *block = take(&blocks, p);
    if (block) used[block->device] -= block->size, munmap(block->start, block->size), free(block);
    pthread_mutex_unlock(&stub_mutex);
    return 0;
}
cudaError_t cudaHostAlloc(void **p, size_t n, unsigned flags) {
    *p = aligned_alloc(PAGE, UP(n ? n : 1, PAGE));
    add(&pinned_blocks, *p, n, 0);
    return 0;
}
cudaError_t cudaMallocHost(void **p, size_t n) { return cudaHostAlloc(p, n, 0); }
cudaError_t cudaFreeHost(void *p) {
    pthread_mutex_lock(&stub_mutex);
    struct block *block = take(&pinned_blocks, p);
    pthread_mutex_unlock(&stub_mutex);
    free(block), free(p);
    return 0;
}
/* Memory of the host that others have pinned already, such as NCCL's buffers in torch. */
cudaError_t cudaHostRegister(void *p, size_t n, unsigned flags) {
    add(&pinned_blocks, p, n, 0);
    return 0;
}
cudaError_t cudaHostUnregister(void *p) {
    pthread_mutex_lock(&stub_mutex);
    struct block *block = take(&pinned_blocks, p);
    pthread_mutex_unlock(&stub_mutex);
    free(block);
    return 0;
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
    int found = stub_device_of(p);
    memset(a, 0, sizeof *a);
    a->type = found >= 0     ? cudaMemoryTypeDevice
              : is_pinned(p) ? cudaMemoryTypeHost
                             : cudaMemoryTypeUnregistered;
    a->device = found >= 0 ? found : 0;
    a->devicePointer = a->hostPointer = (void *)p;
    return 0;
}

/* ---- copies ------------------------------------------------------------------------------------ */

struct copy {
    char *to, *from;
    size_t to_pitch, from_pitch, width, height;
    int owns_from, value; /* value < 0: a copy; else a memset */
};

/* Gives whole pages back instead of touching them. */
static void clear(char *start, size_t n) {
    if (n < (1u << 20)) {
        memset(start, 0, n);
        return;
    }
    char *end = start + n, *first = (char *)UP((unsigned long)start, PAGE);
    char *last = (char *)((unsigned long)end & ~(PAGE - 1));
    memset(start, 0, first - start);
    madvise(first, last - first, MADV_DONTNEED);
    memset(last, 0, end - last);
}
static void run_copy(void *argument) {
    struct copy *c = argument;
    for (size_t i = 0; i < c->height; i++) {
        char *to = c->to + i * c->to_pitch;
        if (c->value < 0) memmove(to, c->from + i * c->from_pitch, c->width);
        else if (c->value) memset(to, c->value, c->width);
        else clear(to, c->width);
    }
    if (c->owns_from) free(c->from);
    free(c);
}
/* From pageable memory the bytes are taken at once; to pageable memory the caller waits. */
static cudaError_t put(struct copy how, enum cudaMemcpyKind kind, cudaStream_t s) {
    struct stream *stream = stub_stream_of(s);
    struct copy *c = malloc(sizeof *c);
    *c = how;
    if (how.value < 0 && kind == cudaMemcpyDeviceToHost) stub_counts[TO_HOST]++;
    if (how.value < 0 && kind == cudaMemcpyHostToDevice) {
        stub_counts[TO_DEVICE]++;
        if (!stub_is_idle(stream) && !is_pinned(how.from)) {
            char *own = malloc(how.width * how.height);
            for (size_t i = 0; i < how.height; i++)
                memcpy(own + i * how.width, how.from + i * how.from_pitch, how.width);
            c->from = own, c->from_pitch = how.width, c->owns_from = 1;
        }
    }
    int is_done = stub_enqueue(s, run_copy, c, 1);
    if (!is_done && kind == cudaMemcpyDeviceToHost && !is_pinned(how.to)) stub_wait_for(stream);
    return 0;
}
cudaError_t cudaMemcpyAsync(
    void *to, const void *from, size_t n, enum cudaMemcpyKind kind, cudaStream_t s) {
    return put((struct copy){to, (char *)from, 0, 0, n, 1, 0, -1}, kind, s);
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t n, enum cudaMemcpyKind kind) {
    stub_counts[SYNCS]++;
    cudaMemcpyAsync(to, from, n, kind, 0);
    stub_wait_for(stub_stream_of(0));
    return 0;
}
cudaError_t cudaMemcpyPeerAsync(
    void *to, int to_device, const void *from, int from_device, size_t n, cudaStream_t s) {
    return cudaMemcpyAsync(to, from, n, cudaMemcpyDeviceToDevice, s);
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch,
    size_t width, size_t height, enum cudaMemcpyKind kind, cudaStream_t s) {
    struct copy how = {to, (char *)from, to_pitch, from_pitch, width, height, 0, -1};
    return put(how, kind, s);
}
cudaError_t cudaMemsetAsync(void *to, int value, size_t n, cudaStream_t s) {
    return put((struct copy){to, 0, 0, 0, n, 1, 0, value & 255}, cudaMemcpyDeviceToDevice, s);
}
cudaError_t cudaMemset(void *to, int value, size_t n) { return cudaMemsetAsync(to, value, n, 0); }
