/* A file system of a given speed, for whatever program this library is loaded into (LD_PRELOAD).

   Bytes that are written to or read from files below THROTTLE_FOLDER pass one queue that all processes
   share: THROTTLE_BYTES_PER_S of them in a second, counted in the file THROTTLE_STATE. A call returns when
   its bytes have passed: nothing hides in a cache. Calls that open, list or look up a path there are counted:
   what a server of metadata would be asked. Of the libraries that a library needs each is one that is opened.

       process 1 ──4 MiB──┐
       process 2 ──4 MiB──┼──► next free moment ──► sleep until then ──► the real call
       process 3 ──4 MiB──┘                                                                            */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <dirent.h>
#include <link.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define PIECE ((size_t)4 << 20)

struct state {
    _Atomic uint64_t free_at_ns;
    _Atomic uint64_t written;
    _Atomic uint64_t read;
    _Atomic uint64_t operations;
};

static struct state *state;
static char folder[4096];
static size_t folder_length;
static double ns_per_byte;

__attribute__((constructor)) static void begin(void)
{
    const char *where = getenv("THROTTLE_FOLDER"), *file = getenv("THROTTLE_STATE");
    const char *speed = getenv("THROTTLE_BYTES_PER_S");
    if (!where || !file || !speed || strlen(where) >= sizeof folder)
        return;
    int fd = open(file, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return;
    void *memory = mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (memory == MAP_FAILED)
        return;
    strcpy(folder, where);
    folder_length = strlen(folder);
    ns_per_byte = 1e9 / atof(speed);
    state = memory;
}

static int below(const char *path)
{
    return state && path && strncmp(path, folder, folder_length) == 0 &&
           (path[folder_length] == '/' || path[folder_length] == 0);
}

/* A path was given to the file system. */
static void count(const char *path)
{
    if (below(path))
        atomic_fetch_add(&state->operations, 1);
}

static int ours(int fd)
{
    char link[32], path[4096];
    if (!state)
        return 0;
    int saved = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path);
    errno = saved;
    return length > (ssize_t)folder_length && path[folder_length] == '/' &&
           memcmp(path, folder, folder_length) == 0;
}

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Take our place in the queue, and wait until these bytes have passed. */
static void pass(size_t bytes, _Atomic uint64_t *counter)
{
    uint64_t takes = (uint64_t)((double)bytes * ns_per_byte), before, until;
    atomic_fetch_add(counter, bytes);
    before = atomic_load(&state->free_at_ns);
    do {
        uint64_t now = now_ns();
        until = (before > now ? before : now) + takes;
    } while (!atomic_compare_exchange_weak(&state->free_at_ns, &before, until));
    struct timespec end = {(time_t)(until / 1000000000u), (long)(until % 1000000000u)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &end, NULL) == EINTR)
        ;
}

static void pass_in_pieces(size_t bytes, _Atomic uint64_t *counter)
{
    for (; bytes > PIECE; bytes -= PIECE)
        pass(PIECE, counter);
    pass(bytes, counter);
}

#define REAL(type, name, ...)                                                                           \
    static type (*real)(__VA_ARGS__);                                                                   \
    if (!real)                                                                                          \
        real = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name);

static size_t total(const struct iovec *vectors, int count)
{
    size_t sum = 0;
    for (int i = 0; i < count; i++)
        sum += vectors[i].iov_len;
    return sum;
}

ssize_t write(int fd, const void *data, size_t length)
{
    REAL(ssize_t, write, int, const void *, size_t)
    if (!ours(fd))
        return real(fd, data, length);
    size_t done = 0;
    while (done < length) { /* in pieces, so that others have their turn */
        size_t piece = length - done > PIECE ? PIECE : length - done;
        pass(piece, &state->written);
        ssize_t put = real(fd, (const char *)data + done, piece);
        if (put < 0)
            return done ? (ssize_t)done : put;
        done += (size_t)put;
        if ((size_t)put < piece)
            break;
    }
    return (ssize_t)done;
}

ssize_t pwrite(int fd, const void *data, size_t length, off_t at)
{
    REAL(ssize_t, pwrite, int, const void *, size_t, off_t)
    if (ours(fd))
        pass_in_pieces(length, &state->written);
    return real(fd, data, length, at);
}

ssize_t pwrite64(int fd, const void *data, size_t length, off_t at)
{
    return pwrite(fd, data, length, at);
}

ssize_t writev(int fd, const struct iovec *vectors, int count)
{
    REAL(ssize_t, writev, int, const struct iovec *, int)
    if (ours(fd))
        pass_in_pieces(total(vectors, count), &state->written);
    return real(fd, vectors, count);
}

size_t fwrite(const void *data, size_t size, size_t count, FILE *file)
{
    REAL(size_t, fwrite, const void *, size_t, size_t, FILE *)
    if (ours(fileno(file)))
        pass_in_pieces(size * count, &state->written);
    return real(data, size, count, file);
}

ssize_t read(int fd, void *data, size_t length)
{
    REAL(ssize_t, read, int, void *, size_t)
    ssize_t got = real(fd, data, length);
    if (got > 0 && ours(fd))
        pass_in_pieces((size_t)got, &state->read);
    return got;
}

ssize_t pread(int fd, void *data, size_t length, off_t at)
{
    REAL(ssize_t, pread, int, void *, size_t, off_t)
    ssize_t got = real(fd, data, length, at);
    if (got > 0 && ours(fd))
        pass_in_pieces((size_t)got, &state->read);
    return got;
}

ssize_t pread64(int fd, void *data, size_t length, off_t at)
{
    return pread(fd, data, length, at);
}

ssize_t readv(int fd, const struct iovec *vectors, int count)
{
    REAL(ssize_t, readv, int, const struct iovec *, int)
    ssize_t got = real(fd, vectors, count);
    if (got > 0 && ours(fd))
        pass_in_pieces((size_t)got, &state->read);
    return got;
}

size_t fread(void *data, size_t size, size_t count, FILE *file)
{
    REAL(size_t, fread, void *, size_t, size_t, FILE *)
    size_t got = real(data, size, count, file);
    if (got > 0 && ours(fileno(file)))
        pass_in_pieces(got * size, &state->read);
    return got;
}

ssize_t sendfile(int out, int in, off_t *at, size_t length)
{
    REAL(ssize_t, sendfile, int, int, off_t *, size_t)
    if (length > PIECE)
        length = PIECE;
    ssize_t done = real(out, in, at, length);
    if (done > 0 && ours(in))
        pass((size_t)done, &state->read);
    if (done > 0 && ours(out))
        pass((size_t)done, &state->written);
    return done;
}

ssize_t sendfile64(int out, int in, off_t *at, size_t length)
{
    return sendfile(out, in, at, length);
}

ssize_t copy_file_range(int in, off_t *from, int out, off_t *to, size_t length, unsigned flags)
{
    REAL(ssize_t, copy_file_range, int, off_t *, int, off_t *, size_t, unsigned)
    if (length > PIECE)
        length = PIECE;
    ssize_t done = real(in, from, out, to, length, flags);
    if (done > 0 && ours(in))
        pass((size_t)done, &state->read);
    if (done > 0 && ours(out))
        pass((size_t)done, &state->written);
    return done;
}

/* ---- Operations on paths */

static int loaded(struct dl_phdr_info *info, size_t size, void *sum)
{
    (void)size;
    *(int *)sum += below(info->dlpi_name);
    return 0;
}

void *dlopen(const char *path, int flags)
{
    REAL(void *, dlopen, const char *, int)
    int before = 0, after = 0;
    dl_iterate_phdr(loaded, &before);
    void *handle = real(path, flags);
    dl_iterate_phdr(loaded, &after);
    if (after > before)
        atomic_fetch_add(&state->operations, (uint64_t)(after - before));
    return handle;
}

#define MODE(flags, last)                                                                               \
    mode_t mode = 0;                                                                                    \
    if ((flags) & (O_CREAT | __O_TMPFILE)) {                                                            \
        va_list rest;                                                                                   \
        va_start(rest, last);                                                                           \
        mode = va_arg(rest, mode_t);                                                                    \
        va_end(rest);                                                                                   \
    }

#define OPEN(name)                                                                                      \
    int name(const char *path, int flags, ...)                                                          \
    {                                                                                                   \
        REAL(int, name, const char *, int, ...)                                                         \
        MODE(flags, flags)                                                                              \
        count(path);                                                                                    \
        return real(path, flags, mode);                                                                 \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                                                    \
    int name(int at, const char *path, int flags, ...)                                                  \
    {                                                                                                   \
        REAL(int, name, int, const char *, int, ...)                                                    \
        MODE(flags, flags)                                                                              \
        count(path);                                                                                    \
        return real(at, path, flags, mode);                                                             \
    }
OPENAT(openat)
OPENAT(openat64)

#define ONE(type, name, other)                                                                          \
    type name(const char *path, other more)                                                             \
    {                                                                                                   \
        REAL(type, name, const char *, other)                                                           \
        count(path);                                                                                    \
        return real(path, more);                                                                        \
    }
ONE(int, stat, struct stat *)
ONE(int, lstat, struct stat *)
ONE(int, stat64, struct stat64 *)
ONE(int, lstat64, struct stat64 *)
ONE(int, access, int)
ONE(FILE *, fopen, const char *)
ONE(FILE *, fopen64, const char *)

int fstatat(int at, const char *path, struct stat *found, int flags)
{
    REAL(int, fstatat, int, const char *, struct stat *, int)
    count(path);
    return real(at, path, found, flags);
}

int fstatat64(int at, const char *path, struct stat64 *found, int flags)
{
    REAL(int, fstatat64, int, const char *, struct stat64 *, int)
    count(path);
    return real(at, path, found, flags);
}

ssize_t readlink(const char *path, char *link, size_t size)
{
    REAL(ssize_t, readlink, const char *, char *, size_t)
    count(path);
    return real(path, link, size);
}

DIR *opendir(const char *path)
{
    REAL(DIR *, opendir, const char *)
    count(path);
    return real(path);
}

int execve(const char *path, char *const words[], char *const variables[])
{
    REAL(int, execve, const char *, char *const[], char *const[])
    count(path);
    return real(path, words, variables);
}
