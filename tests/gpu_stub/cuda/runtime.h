/* What the files of the stub have in common. All of it lies in libcudart.so.13. */
#ifndef STUB_RUNTIME_H
#define STUB_RUNTIME_H
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdlib.h>

#define DEVICES 16
#define UP(x, to) (((x) + (to)-1) & ~((unsigned long)(to)-1))

/* One lock for the whole stub: it guards some instructions at a time, never a piece of work. */
extern pthread_mutex_t stub_mutex;
extern pthread_cond_t stub_changed;
/* The current device of a thread. */
extern __thread int stub_device;

struct stream;
struct stream *stub_stream_of(void *handle);
int stub_is_idle(struct stream *stream);
void stub_wait_for(struct stream *stream);
void stub_wait_for_all(void);
/* Puts work on a stream. With `here` it runs in the caller where nothing is before it. Returns
 * whether it has run. */
int stub_enqueue(void *handle, void (*run)(void *), void *argument, int here);
/* The device that an address belongs to; -1: memory of the host. */
int stub_device_of(const void *p);

int stub_take_bytes(int device, size_t n);
void stub_give_bytes(int device, size_t n);
void stub_add_block(char *start, size_t n, int device);
void stub_take_block(void *start);

/* Devices that torch sees, and bytes of each. */
int stub_device_count(void);
size_t stub_device_bytes(void);

/* Counts what torch asks for: waits of the host, copies to it and from it, launches of kernels. */
enum count { SYNCS, TO_HOST, TO_DEVICE, LAUNCHES, COUNTS };
extern _Atomic unsigned long stub_counts[COUNTS];
#endif
