/* Preloaded: one call on files of a checkpoint directory does not come back, as on a disk that
 * sticks, until it is let go. A call is named by what it does and the file: "rename .metadata.tmp".
 * Calls are those of the C library that Python, torch and C++ streams make. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <unistd.h>

#define MOST 512
#define LONGEST 160

static volatile int is_watching, is_held, times_let_go;
static char root[4096], wanted[LONGEST], seen[MOST][LONGEST];
static int num_seen;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* From here on; `call` is held the first time, "" holds none. */
void stuck_begin(const char *folder, const char *call) {
    pthread_mutex_lock(&lock);
    snprintf(root, sizeof root, "%s", folder);
    snprintf(wanted, sizeof wanted, "%s", call);
    num_seen = 0;
    is_held = 0;
    is_watching = 1;
    pthread_mutex_unlock(&lock);
}

/* No further call is held or noted. */
void stuck_end(void) { is_watching = 0; }

/* What is held goes on. */
void stuck_let_go(void) { times_let_go++; }

int stuck_is_held(void) { return is_held; }

int stuck_num_seen(void) { return num_seen; }

const char *stuck_seen(int number) { return seen[number]; }

static void look(const char *what, const char *path) {
    char name[LONGEST];
    int is_mine = 0;
    if (!is_watching || !path || strncmp(path, root, strlen(root))) return;
    /* What the run does at any time is no part of a save. */
    if (strstr(path, "/control") || strstr(path, "/stacks") || strstr(path, "lock")) return;
    const char *last = strrchr(path, '/');
    snprintf(name, sizeof name, "%s %s", what, last ? last + 1 : path);
    pthread_mutex_lock(&lock);
    int i = 0;
    while (i < num_seen && strcmp(seen[i], name)) i++;
    if (i == num_seen && num_seen < MOST) strcpy(seen[num_seen++], name);
    is_mine = !is_held && !strcmp(name, wanted);
    int before = times_let_go;
    if (is_mine) is_held = 1;
    pthread_mutex_unlock(&lock);
    while (is_mine && times_let_go == before) usleep(10000);
}

static void look_at(const char *what, int folder, const char *path) {
    char whole[8192], link[64];
    if (!is_watching || !path) return;
    if (path[0] == '/' || folder == AT_FDCWD) {
        look(what, path);
        return;
    }
    snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
    ssize_t size = readlink(link, whole, 4096);
    if (size <= 0) return;
    snprintf(whole + size, sizeof whole - size, "/%s", path);
    look(what, whole);
}

static void look_of(const char *what, int file) {
    char whole[4096], link[64];
    if (!is_watching) return;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t size = readlink(link, whole, sizeof whole - 1);
    if (size <= 0) return;
    whole[size] = 0;
    look(what, whole);
}

#define REAL(name) ((__typeof__(&name))real(#name))
static void *real(const char *name) { return dlsym(RTLD_NEXT, name); }

#define OPEN(name)                                                                                 \
    int name(const char *path, int flags, ...) {                                                   \
        va_list more;                                                                              \
        va_start(more, flags);                                                                     \
        mode_t mode = va_arg(more, mode_t);                                                        \
        va_end(more);                                                                              \
        look("open", path);                                                                        \
        return REAL(name)(path, flags, mode);                                                      \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                                               \
    int name(int folder, const char *path, int flags, ...) {                                       \
        va_list more;                                                                              \
        va_start(more, flags);                                                                     \
        mode_t mode = va_arg(more, mode_t);                                                        \
        va_end(more);                                                                              \
        look_at("open", folder, path);                                                             \
        return REAL(name)(folder, path, flags, mode);                                              \
    }
OPENAT(openat)
OPENAT(openat64)

#define PATH(type, name, what, more, given)                                                        \
    type name(const char *path more) {                                                             \
        look(what, path);                                                                          \
        return REAL(name)(path given);                                                             \
    }
#define AND(...) , __VA_ARGS__
PATH(FILE *, fopen, "open", AND(const char *mode), AND(mode))
PATH(FILE *, fopen64, "open", AND(const char *mode), AND(mode))
PATH(DIR *, opendir, "list", , )
PATH(int, mkdir, "mkdir", AND(mode_t mode), AND(mode))
PATH(int, rmdir, "rmdir", , )
PATH(int, unlink, "unlink", , )
PATH(int, access, "stat", AND(int mode), AND(mode))
PATH(int, stat, "stat", AND(struct stat *found), AND(found))
PATH(int, stat64, "stat", AND(struct stat64 *found), AND(found))
PATH(int, lstat, "stat", AND(struct stat *found), AND(found))
PATH(int, lstat64, "stat", AND(struct stat64 *found), AND(found))
PATH(int, statvfs, "statvfs", AND(struct statvfs *found), AND(found))
PATH(int, statvfs64, "statvfs", AND(struct statvfs64 *found), AND(found))
PATH(int, rename, "rename", AND(const char *to), AND(to))
PATH(int, link, "link", AND(const char *to), AND(to))

#define AT(name, what, more, given)                                                                \
    int name(int folder, const char *path more) {                                                  \
        look_at(what, folder, path);                                                               \
        return REAL(name)(folder, path given);                                                     \
    }
AT(mkdirat, "mkdir", AND(mode_t mode), AND(mode))
AT(unlinkat, "unlink", AND(int flags), AND(flags))
AT(fstatat, "stat", AND(struct stat *found, int flags), AND(found, flags))
AT(fstatat64, "stat", AND(struct stat64 *found, int flags), AND(found, flags))
AT(faccessat, "stat", AND(int mode, int flags), AND(mode, flags))
AT(renameat, "rename", AND(int other, const char *to), AND(other, to))

#define OF(type, name, what, more, given)                                                          \
    type name(int file more) {                                                                     \
        look_of(what, file);                                                                       \
        return REAL(name)(file given);                                                             \
    }
OF(ssize_t, write, "write", AND(const void *data, size_t size), AND(data, size))
OF(ssize_t, writev, "write", AND(const struct iovec *data, int number), AND(data, number))
OF(ssize_t, read, "read", AND(void *data, size_t size), AND(data, size))
OF(int, fsync, "fsync", , )
OF(int, fdatasync, "fsync", , )
OF(int, close, "close", , )
