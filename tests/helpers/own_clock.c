/* Preloaded: the wall clock of a process is that of the machine and the seconds that lie, as eight
 * bytes, at the start of the file COPUS_TEST_CLOCK. Other clocks are left alone, and so are the
 * stamps of files. Waits until a time of the wall clock end when that clock shows it, but for jumps
 * while they wait. There are no locks, so that a process may be killed or stopped anywhere. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

/* No monotonic clock shows so many seconds, and no wall clock fewer. */
#define WALL 1000000000

static volatile int64_t *ahead;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("COPUS_TEST_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *found = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    if (found != MAP_FAILED) ahead = found;
    close(file);
}

static int64_t offset(void) { return ahead ? *ahead : 0; }

int clock_gettime(clockid_t clock, struct timespec *now) {
    int problem = (int)syscall(SYS_clock_gettime, clock, now);
    if (!problem && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += offset();
    return problem;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec fine;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &fine);
    now->tv_sec = fine.tv_sec;
    now->tv_usec = fine.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *also) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (also) *also = now.tv_sec;
    return now.tv_sec;
}

static struct timespec machine(const struct timespec *until) {
    struct timespec real = *until;
    if (real.tv_sec > WALL) real.tv_sec -= offset();
    return real;
}

/* The newest of several versions that the C library may have of a function. */
static void *next(const char *name) {
    void *found = dlvsym(RTLD_NEXT, name, "GLIBC_2.34");
    if (!found) found = dlvsym(RTLD_NEXT, name, "GLIBC_2.3.2");
    return found ? found : dlsym(RTLD_NEXT, name);
}

int sem_timedwait(sem_t *restrict it, const struct timespec *restrict until) {
    int (*real)(sem_t *, const struct timespec *) = next("sem_timedwait");
    struct timespec at = machine(until);
    return real(it, &at);
}

int pthread_cond_timedwait(pthread_cond_t *restrict it, pthread_mutex_t *restrict lock,
                           const struct timespec *restrict until) {
    int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *) =
        next("pthread_cond_timedwait");
    struct timespec at = machine(until);
    return real(it, lock, &at);
}

int pthread_cond_clockwait(pthread_cond_t *it, pthread_mutex_t *lock, clockid_t clock,
                           const struct timespec *until) {
    int (*real)(pthread_cond_t *, pthread_mutex_t *, clockid_t, const struct timespec *) =
        next("pthread_cond_clockwait");
    struct timespec at = clock == CLOCK_REALTIME ? machine(until) : *until;
    return real(it, lock, clock, &at);
}
