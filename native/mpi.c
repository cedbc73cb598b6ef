/* MPI as the carrier of streams, for networks that it drives better than the kernel does.
 *
 *     sender                                               receiver
 *     bytes ──copy──► slot ──MPI_Isend(rank, tag)──► slot ──copy──► where they are wanted
 *     socket ────────────────────────────────────── socket        tells of the end of either side, as it does without
 *
 * Messages of one tag are the bytes of one stream, cut anywhere; an empty one is its end. MPI moves bytes only: sums are
 * ours. It does nothing on its own, so a thread goes on with what was sent as long as there is any. What is received is
 * copied out of slots rather than received where it is wanted: a receive that has begun cannot be taken back, and the
 * tensor of a collective that has failed is its owner's again.
 */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

/* Two a direction: while one is under way, the other is filled or emptied. */
enum { SLOTS = 2, STATUS_BYTES = 256, MPI_OK = 0 };
static const size_t SLOT_BYTES = 128 * 1024;
/* After the other side has ended: what it sent before may still come. */
static const uint64_t AFTER_END_NS = 500 * 1000 * 1000, LOOK_NS = 1000 * 1000;

/* A handle is an int in MPICH and what descends from it, a pointer in Open MPI and in MPI 5. */
typedef int (*move_ints)(void *, int, int, int, int, int, uint64_t *);
typedef int (*move_pointers)(void *, int, void *, int, int, void *, uint64_t *);
typedef int (*count_ints)(const void *, int, int *);
typedef int (*count_pointers)(const void *, void *, int *);
typedef int (*test_any)(uint64_t *, int *, void *);
typedef int (*cancel_any)(uint64_t *);

struct slot {
    char *data;
    uint64_t request;           /* room for a handle of either kind */
    bool busy;
};

struct mpi_out {
    int to, tag;
    pthread_mutex_t lock;
    struct slot slots[SLOTS], last, end;
    int next;
    bool ended;
    int socket;                 /* once the group has let go of it: closed when all has gone; else -1 */
    bool listed;                /* something is under way; of `all` */
    struct mpi_out *following;
};

struct mpi_in {
    int from, tag;
    struct slot slots[SLOTS];
    int next;
    bool here;                  /* the next one has come, */
    size_t at, bytes;           /* and so much of it was taken */
    uint64_t looked_ns, ended_ns;
    int error;
};

static ff_mpi mpi;
static _Atomic int tags;
static struct {
    pthread_mutex_t lock;
    pthread_cond_t work;
    struct mpi_out *first;
    bool has_thread;
    bool over;                  /* read with either lock held */
} all = {.lock = PTHREAD_MUTEX_INITIALIZER, .work = PTHREAD_COND_INITIALIZER};
static pthread_rwlock_t ending = PTHREAD_RWLOCK_INITIALIZER;   /* nobody is in MPI when it is finalized */

void ff_mpi_use(const ff_mpi *found)
{
    mpi = *found;
}

/* Of a stream that this process opens. Used again after some thousands at the least, when the first ones are closed. */
int ff_mpi_tag(void)
{
    return (int)((unsigned)atomic_fetch_add(&tags, 1) % (unsigned)mpi.tags);
}

static bool enter(void)
{
    pthread_rwlock_rdlock(&ending);
    if (!all.over)
        return true;
    pthread_rwlock_unlock(&ending);
    return false;
}

static bool leave(int status)
{
    pthread_rwlock_unlock(&ending);
    return status == MPI_OK;
}

/* MPI_Isend or MPI_Irecv. */
static bool start(void *function, struct slot *slot, size_t bytes, int other, int tag)
{
    if (!enter())
        return false;
    slot->busy = true;
    return leave(mpi.pointers ? ((move_pointers)function)(slot->data, (int)bytes, (void *)(uintptr_t)mpi.byte, other, tag,
                                                          (void *)(uintptr_t)mpi.comm, &slot->request)
                              : ((move_ints)function)(slot->data, (int)bytes, (int)mpi.byte, other, tag, (int)mpi.comm,
                                                      &slot->request));
}

/* Whether a slot is done with; false: MPI has failed. */
static bool test(struct slot *slot, int *bytes)
{
    _Alignas(16) char status[STATUS_BYTES] = {0};
    int done = 0;
    if (!slot->busy)
        return true;
    if (!enter())
        return false;
    bool well = ((test_any)mpi.test)(&slot->request, &done, status) == MPI_OK;
    if (well && done && bytes)
        well = (mpi.pointers ? ((count_pointers)mpi.count)(status, (void *)(uintptr_t)mpi.byte, bytes)
                             : ((count_ints)mpi.count)(status, (int)mpi.byte, bytes)) == MPI_OK;
    slot->busy = !done;
    return leave(well ? MPI_OK : !MPI_OK);
}

static bool make_slots(struct slot *slots)
{
    for (int i = 0; i < SLOTS; i++)
        if (!(slots[i].data = malloc(SLOT_BYTES)))
            return false;
    return true;
}

/* MPI may still read or write one that is busy. */
static void free_slots(struct slot *slots)
{
    for (int i = 0; i < SLOTS; i++)
        if (!slots[i].busy)
            free(slots[i].data);
}

/* ---- what is sent */

struct mpi_out *ff_mpi_out(int to, int tag)
{
    struct mpi_out *out = calloc(1, sizeof *out);
    if (!out)
        return NULL;
    out->to = to;
    out->tag = tag;
    out->socket = -1;
    pthread_mutex_init(&out->lock, NULL);
    if (make_slots(out->slots) && (out->last.data = malloc(sizeof(struct head))))
        return out;
    free_slots(out->slots);
    free(out);
    return NULL;
}

static void forget(struct mpi_out *out)
{
    close(out->socket);
    free_slots(out->slots);
    if (!out->last.busy)
        free(out->last.data);
    pthread_mutex_destroy(&out->lock);
    free(out);
}

static bool is_under_way(struct mpi_out *out)
{
    struct slot *slots[] = {&out->slots[0], &out->slots[1], &out->last, &out->end};
    bool busy = false;
    for (int i = 0; i < SLOTS + 2; i++)
        busy |= test(slots[i], NULL) && slots[i]->busy;     /* what has failed goes no further */
    return busy;
}

static bool has_ended(int socket)
{
    char byte;
    ssize_t got = recv(socket, &byte, 1, MSG_DONTWAIT);     /* it tells of its end, too */
    return got >= 0 || (errno != EAGAIN && errno != EINTR);
}

/* Go on with all that is under way; the lock is held. */
static void go_on(void)
{
    for (struct mpi_out **link = &all.first; *link;) {
        struct mpi_out *out = *link;
        if (pthread_mutex_trylock(&out->lock)) {        /* its sender goes on with it */
            link = &out->following;
            continue;
        }
        bool over = !is_under_way(out) || (out->socket >= 0 && has_ended(out->socket));
        bool unused = over && out->socket >= 0;
        if (over) {
            *link = out->following;
            out->listed = false;
        } else {
            link = &out->following;
        }
        pthread_mutex_unlock(&out->lock);
        if (unused)
            forget(out);
    }
}

static void *thread_main(void *nothing)
{
    pthread_mutex_lock(&all.lock);
    for (int naps = 0; !all.over; naps++) {
        if (!all.first) {
            pthread_cond_wait(&all.work, &all.lock);
            naps = 0;
            continue;
        }
        go_on();
        pthread_mutex_unlock(&all.lock);
        usleep((useconds_t)(ff_mpi_nap_ns(naps) / 1000));
        pthread_mutex_lock(&all.lock);
    }
    pthread_mutex_unlock(&all.lock);
    return nothing;
}

/* The thread goes on with it. `out` is locked. */
static void list(struct mpi_out *out)
{
    sigset_t every, before;
    pthread_t thread;
    pthread_mutex_lock(&all.lock);
    if (!out->listed) {
        out->listed = true;
        out->following = all.first;
        all.first = out;
    }
    if (!all.has_thread) {
        sigfillset(&every);
        pthread_sigmask(SIG_SETMASK, &every, &before);
        all.has_thread = pthread_create(&thread, NULL, thread_main, NULL) == 0 && pthread_detach(thread) == 0;
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    pthread_cond_signal(&all.work);
    pthread_mutex_unlock(&all.lock);
}

static bool post(struct mpi_out *out, struct slot *slot, size_t bytes)
{
    bool well = start(mpi.send, slot, bytes, out->to, out->tag) && test(slot, NULL);
    if (well && slot->busy && !out->listed)
        list(out);
    return well;
}

ssize_t ff_mpi_send(struct mpi_out *out, const struct iovec *parts, int count)
{
    ssize_t sent = -1;
    int why = EAGAIN;
    pthread_mutex_lock(&out->lock);
    struct slot *slot = &out->slots[out->next];
    if (out->ended || !test(slot, NULL)) {
        why = EPIPE;
    } else if (!slot->busy) {
        size_t bytes = 0;
        for (int i = 0; i < count; i++) {
            size_t some = least(parts[i].iov_len, SLOT_BYTES - bytes);
            copy(slot->data + bytes, parts[i].iov_base, some);
            bytes += some;
        }
        out->next = (out->next + 1) % SLOTS;
        if (post(out, slot, bytes))
            sent = (ssize_t)bytes;
        else
            why = EPIPE;
    }
    pthread_mutex_unlock(&out->lock);
    errno = why;                /* last: MPI leaves anything there */
    return sent;
}

/* Nothing follows but `last`, if there is one. */
void ff_mpi_end(struct mpi_out *out, const struct head *last)
{
    pthread_mutex_lock(&out->lock);
    if (!out->ended) {
        out->ended = true;
        if (last) {
            copy(out->last.data, last, sizeof *last);
            post(out, &out->last, sizeof *last);
        }
        post(out, &out->end, 0);
    }
    pthread_mutex_unlock(&out->lock);
}

/* The group is closed: what is under way goes on, unless the other side ends, and then the socket is closed. */
void ff_mpi_let_go(struct mpi_out *out, int socket)
{
    pthread_mutex_lock(&out->lock);
    out->socket = socket;
    list(out);
    pthread_mutex_unlock(&out->lock);
}

/* ---- what is received */

static bool expect(struct mpi_in *in, int i)
{
    return start(mpi.receive, &in->slots[i], SLOT_BYTES, in->from, in->tag);
}

struct mpi_in *ff_mpi_in(int from, int tag)
{
    struct mpi_in *in = calloc(1, sizeof *in);
    if (!in)
        return NULL;
    in->from = from;
    in->tag = tag;
    bool well = make_slots(in->slots);
    for (int i = 0; i < SLOTS && well; i++)
        well = expect(in, i);
    if (well)
        return in;
    ff_mpi_close(in);
    return NULL;
}

/* Nothing has come: whether anything will. */
static ssize_t nothing_from(struct mpi_in *in, int socket)
{
    uint64_t now_ns = ff_now_ns();
    char byte;
    errno = EAGAIN;
    if (!in->ended_ns && now_ns - in->looked_ns < LOOK_NS)
        return -1;
    in->looked_ns = now_ns;
    if (!in->ended_ns) {
        ssize_t got = recv(socket, &byte, 1, MSG_DONTWAIT | MSG_PEEK);
        if (got < 0 && (errno == EAGAIN || errno == EINTR))
            return -1;
        in->error = got < 0 ? errno : 0;
        in->ended_ns = now_ns;
    }
    bool over = now_ns - in->ended_ns > AFTER_END_NS;
    errno = over ? in->error : EAGAIN;
    return over && !in->error ? 0 : -1;
}

ssize_t ff_mpi_receive(struct mpi_in *in, int socket, const struct iovec *parts, int count)
{
    struct slot *slot = &in->slots[in->next];
    if (!in->here) {
        int bytes = 0;
        if (!test(slot, &bytes)) {
            errno = EIO;
            return -1;
        }
        if (slot->busy)
            return nothing_from(in, socket);
        in->here = true;
        in->at = 0;
        in->bytes = (size_t)bytes;
    }
    size_t before = in->at;
    for (int i = 0; i < count; i++) {
        size_t some = least(parts[i].iov_len, in->bytes - in->at);
        copy(parts[i].iov_base, slot->data + in->at, some);
        in->at += some;
    }
    ssize_t taken = (ssize_t)(in->at - before);
    if (in->at < in->bytes || !in->bytes)
        return taken;           /* 0: the end, again and again */
    in->here = false;
    if (!expect(in, in->next)) {
        errno = EIO;
        return -1;
    }
    in->next = (in->next + 1) % SLOTS;
    return taken;
}

void ff_mpi_close(struct mpi_in *in)
{
    for (int i = 0; i < SLOTS; i++) {
        struct slot *slot = &in->slots[i];
        if (slot->busy && enter())
            leave(((cancel_any)mpi.cancel)(&slot->request));
        for (int ms = 0; ms < 100 && slot->busy && test(slot, NULL) && slot->busy; ms++)
            usleep(1000);       /* one that had begun to come comes */
    }
    free_slots(in->slots);
    free(in);
}

/* ---- */

/* How long to sleep where no descriptor tells of what comes. */
uint64_t ff_mpi_nap_ns(int naps)
{
    return UINT64_C(20000) << least((size_t)naps, 6);
}

int ff_mpi_finish(double timeout_s)
{
    uint64_t deadline_ns = ff_deadline_ns(timeout_s);
    int left = 0;
    pthread_mutex_lock(&all.lock);
    while (all.first && ff_now_ns() < deadline_ns) {
        pthread_mutex_unlock(&all.lock);
        usleep(1000);
        pthread_mutex_lock(&all.lock);
        go_on();
    }
    for (const struct mpi_out *out = all.first; out; out = out->following)
        left++;
    pthread_rwlock_wrlock(&ending);
    all.over = true;
    pthread_rwlock_unlock(&ending);
    pthread_cond_broadcast(&all.work);
    pthread_mutex_unlock(&all.lock);
    return left;
}
