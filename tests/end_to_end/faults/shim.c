// Loaded into a process before the C library, this lets its operations on files below one directory
// fail. The operations are counted: opening to write, writing, syncing, renaming, truncating,
// making and removing files and directories.
//
//   FAULT_BELOW   the directory, absolute
//   FAULT_AT      the number of the first operation that fails, from 1; 0 for none
//   FAULT_AS      kill    the process ends there, as by a power cut; a write has written half
//                 short   that write writes half, which is no error
//                 eio     that operation fails
//                 enospc, edquot   from there on nothing can be made or written
//                 erofs   from there on nothing can be changed
//   FAULT_COUNT   a file that gets the number of operations when the process ends
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { NONE, KILL, SHORT, FAIL };

static long count;

static const char *setting(const char *name) {
    const char *value = getenv(name);
    return value ? value : "";
}

// Whether a path is the directory or below it. `at` is what relative paths are relative to.
static int is_below(int at, const char *path) {
    char whole[8192], base[4096], link[64];
    if (path[0] == '/') {
        snprintf(whole, sizeof whole, "%s", path);
    } else {
        ssize_t size = -1;
        if (at == AT_FDCWD) {
            size = getcwd(base, sizeof base) ? (ssize_t)strlen(base) : -1;
        } else {
            snprintf(link, sizeof link, "/proc/self/fd/%d", at);
            size = readlink(link, base, sizeof base - 1);
        }
        if (size < 0) return 0;
        base[size] = 0;
        snprintf(whole, sizeof whole, "%s%s%s", base, path[0] ? "/" : "", path);
    }
    const char *below = setting("FAULT_BELOW");
    size_t length = strlen(below);
    return length && !strncmp(whole, below, length) && (!whole[length] || whole[length] == '/');
}

static int is_file_below(int file) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 0) return 0;
    path[size] = 0;
    return is_below(AT_FDCWD, path);
}

// Counts an operation, and says what becomes of it; `grows` if it needs room on the disk.
static int fate(int grows) {
    long number = __atomic_add_fetch(&count, 1, __ATOMIC_SEQ_CST);
    long first = atol(setting("FAULT_AT"));
    const char *as = setting("FAULT_AS");
    if (!first || number < first) return NONE;
    if (!strcmp(as, "erofs")) return errno = EROFS, FAIL;
    if (grows && !strcmp(as, "enospc")) return errno = ENOSPC, FAIL;
    if (grows && !strcmp(as, "edquot")) return errno = EDQUOT, FAIL;
    if (number > first) return NONE;
    if (!strcmp(as, "eio")) return errno = EIO, FAIL;
    if (!strcmp(as, "kill")) return KILL;
    return strcmp(as, "short") ? NONE : SHORT;
}

static void end(void) {
    kill(getpid(), SIGKILL);
    pause();
}

// Ends the process or returns whether the operation fails.
static int fails(int grows) {
    int found = fate(grows);
    if (found == KILL) end();
    return found == FAIL;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t write(int file, const void *bytes, size_t size) {
    if (!is_file_below(file)) return REAL(write)(file, bytes, size);
    int found = fate(1);
    if (found == FAIL) return -1;
    if (found == KILL || found == SHORT) {
        ssize_t half = REAL(write)(file, bytes, size > 1 ? size / 2 : size);
        if (found == KILL) end();
        return half;
    }
    return REAL(write)(file, bytes, size);
}

static int opens_to_write(int flags) { return (flags & O_ACCMODE) != O_RDONLY || flags & O_CREAT; }

#define OPEN(name)                                                                         \
    int name(const char *path, int flags, ...) {                                           \
        va_list rest;                                                                      \
        va_start(rest, flags);                                                             \
        mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;                          \
        va_end(rest);                                                                      \
        if (opens_to_write(flags) && is_below(AT_FDCWD, path) && fails(flags & O_CREAT))   \
            return -1;                                                                     \
        return REAL(name)(path, flags, mode);                                              \
    }
OPEN(open)
OPEN(open64)

int fsync(int file) { return is_file_below(file) && fails(0) ? -1 : REAL(fsync)(file); }

int ftruncate64(int file, off64_t size) {
    return is_file_below(file) && fails(0) ? -1 : REAL(ftruncate64)(file, size);
}

int rename(const char *from, const char *to) {
    return is_below(AT_FDCWD, to) && fails(0) ? -1 : REAL(rename)(from, to);
}

int mkdir(const char *path, mode_t mode) {
    return is_below(AT_FDCWD, path) && fails(1) ? -1 : REAL(mkdir)(path, mode);
}

int unlink(const char *path) {
    return is_below(AT_FDCWD, path) && fails(0) ? -1 : REAL(unlink)(path);
}

int unlinkat(int at, const char *path, int flags) {
    return is_below(at, path) && fails(0) ? -1 : REAL(unlinkat)(at, path, flags);
}

__attribute__((destructor)) static void tell(void) {
    const char *path = setting("FAULT_COUNT");
    FILE *file = path[0] ? fopen(path, "w") : NULL;
    if (!file) return;
    fprintf(file, "%ld\n", count);
    fclose(file);
}
