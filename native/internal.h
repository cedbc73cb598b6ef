/* What the files of the core share with each other. */
#ifndef FIVEFOLD_INTERNAL_H
#define FIVEFOLD_INTERNAL_H

#include "fivefold.h"

#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>

#define LINE 128       /* two cache lines: neighbours are fetched in pairs */
#define INLINED 80     /* bytes that travel in a post itself */
#define MAGIC UINT64_C(0x46495645464f4c44)

/* A rank posts round k in posts[k % 2]: what it asks for, and that its staging of that round is filled.
 *
 *     round k    fill staging k % 2; post; wait until all have posted; read the others' staging k % 2
 *
 * Whoever posts round k + 1 has read round k. So when all have posted k + 1, staging k % 2 is free again,
 * and that is known before round k + 2 fills it: two suffice, and no rank ever needs to say "done".
 */
struct post {
    _Alignas(LINE) _Atomic uint32_t flag;   /* k + 1 once round k is posted */
    _Atomic uint32_t sleepers;
    uint32_t what;                          /* kind, dtype, reduction */
    int32_t root;
    uint64_t count;
    uint64_t place;                         /* of the tensor in the rank's arena, + 1; 0: elsewhere */
    uint64_t address;                       /* of the tensor in the rank's process; 0: not to be read there */
    uint64_t arrived_ns;                    /* when the rank came to the operation */
    unsigned char inlined[INLINED];
};

/* How fields in shared memory are ordered, for ThreadSanitizer and for processors weaker than x86:
 *
 *     post: what .. inlined       plain; written before `flag` is stored, read after it was seen
 *     staging, slot contents      the same
 *     post.flag, bell.rung        stored, or raised, before `sleepers` is read; who sleeps raises `sleepers` before
 *     post.sleepers,              reading them once more. All four are sequentially consistent: with less, each
 *     bell.sleepers               side may miss the other's store, and a rank sleeps though it was woken
 *     ring.written, ring.taken    release by the one side that writes it, acquire by the other; the bytes between
 *                                 them belong to the reader, all others to the writer
 *     shared.broken, bell.left    set once; who sleeps on a flag or a bell is woken by hand, and looks every LOOK_NS
 *     ff_event                    `seq` is 0 while a row is written; a reader that finds the same `seq` before and
 *                                 after has read what belongs to it. `end_ns` is stored last
 */
struct bell {                               /* rung by others when a rank's messages may go on */
    _Alignas(LINE) _Atomic uint32_t rung;
    _Atomic uint32_t sleepers;
    _Atomic uint32_t left;                  /* the rank has closed the group */
    _Atomic uint32_t polling;               /* the rank sleeps on its waker, as it waits for other nodes too */
};

struct ring {                               /* messages from one rank to one other */
    _Alignas(LINE) _Atomic uint64_t written;
    _Alignas(LINE) _Atomic uint64_t taken;
};

struct shared {
    uint64_t magic;
    uint32_t abi, ranks;
    uint64_t staging_bytes, ring_bytes;
    _Atomic uint64_t broken;                /* 0, or who gave up and why: see failure.c */
};

struct peer {
    int pidfd, pid;
    int waker;                              /* an eventfd; -1: it waits for no other nodes */
    char *arena;
    size_t arena_bytes;
};

struct messages;

struct ff_group {
    struct shared *shared;
    struct post *posts;
    struct bell *bells;
    struct ring *rings;
    char *staging, *ring_data;
    int rank, ranks;
    size_t staging_bytes, ring_bytes;
    bool crowded;
    bool in_order;                          /* see ff_group_in_order */
    bool reaches;                           /* every rank may read the memory of every rank */
    uint64_t token;                         /* what the others read to find that out */
    struct peer peers[FF_MAX_LOCAL];
    struct nodes *nodes;                    /* NULL: all ranks are on this node */

    uint32_t round;                         /* belongs to whoever runs an operation */
    uint64_t sequence;

    pthread_mutex_t lock;                   /* of all below */
    pthread_cond_t work, done;
    ff_op *first, *last;
    bool busy, stopping, has_thread, thread_sleeps;
    int waiters;
    uint64_t posted_ns;                     /* when something was last posted */
    pthread_t thread;
    struct messages *messages;
};

/* How long to wait, and in which manner. */
struct patience {
    uint64_t deadline_ns;
    uint64_t spin_ns, spun_ns;              /* how long to spin at all, and until when */
    uint64_t yield_ns, yielded_ns;          /* the same for yielding the core, afterwards */
    int spins;
};

/* One collective as it runs. */
struct run {
    ff_group *group;
    const ff_call *call;
    size_t size;                            /* bytes of an element */
    uint64_t arrived_ns;
    struct patience patience;
    ff_report *report;
    bool checked;                           /* that all ranks ask for the same */
    const void *offered;                    /* the tensor that the others may reach, told in the next post */
    uint64_t place, address;
};

/* A tensor of another rank, as this one can reach it: mapped here, at an address there, or not at all. */
struct view {
    int rank;
    char *mapped;
    size_t room;                            /* bytes from `mapped` to the end of what is mapped */
    uint64_t address;
};

/* streams.c: between nodes. Ranks are those of all nodes. */

/* What precedes whatever is sent. */
struct head {
    uint32_t what;                          /* of a collective as in a post; of a message its dtype; or GAVE_UP, LEFT */
    int32_t root;                           /* of a message its tag */
    uint64_t count;                         /* elements; of GAVE_UP what `broken` says */
    uint64_t bytes;                         /* of all that belongs to it, here and in other parts */
    uint64_t sequence;
    uint64_t place;                         /* of a collective: see carry.c */
};
#define GAVE_UP UINT32_C(0xffffff01)
#define LEFT UINT32_C(0xffffff02)
#define FF_AHEAD_BYTES 16384

/* How far a stream of collectives has come with a part of a tensor. */
struct way {
    struct head head;
    size_t head_at;                         /* bytes of it that have moved */
    size_t unit, at, end;                   /* of the tensor: which part of it, what moves next, and where it ends */
    bool busy;                              /* with a part whose tensor is known */
};

struct stream {
    _Atomic int out, in;                    /* sockets, each opened by the side that sends; -1: not yet */
    pthread_mutex_t lock;                   /* of `out`, while something is sent or told */
    bool midway;                            /* part of what follows a head has been sent */
    _Atomic bool left;                      /* the rank has closed the group */
    _Atomic bool ended_in, ended_out;       /* nothing more comes; it takes nothing more, */
    _Atomic uint64_t ended_ns;              /* since when */
    _Atomic bool silent;                    /* because nothing was acknowledged any more */
    struct way going, coming;               /* of collectives */
    char *ahead;                            /* FF_AHEAD_BYTES, or NULL: what was received before it was asked for */
    size_t ahead_at, ahead_end;
    struct mpi_out *mpi_out;                /* what carries it instead of `out` and `in`, or NULL */
    struct mpi_in *mpi_in;
};

/* What a collective that sleeps waits for; other threads look at it, which may see parts of two. */
struct held_up {
    _Atomic int peer;                       /* + 1; 0: nothing */
    _Atomic bool sends;
    _Atomic uint64_t moved, bytes;
};

struct nodes {
    int rank, ranks;                        /* of all nodes */
    int node, count;
    int *node_of, *place;                   /* by rank: its node, and which rank of that node it is */
    int *members, *begins;                  /* ranks of node m: members[begins[m]] .. members[begins[m + 1]] */
    int leaders;                            /* as many ranks as the smallest node has */
    ff_connect connect;
    void *self;                             /* of `connect` */
    size_t direct_bytes;                    /* small sums of fewer go straight to each node, others by doubling */
    bool rounds;                            /* each node rounds its part of a sum of 16-bit floats */
    int rails, lanes;
    struct stream *streams[FF_LANES + FF_MAX_RAILS - 1];    /* by rank */
    int *mpi_ranks;                         /* by rank; NULL: sockets carry all */
    char *scratch;                          /* of collectives */
    size_t scratch_bytes;
    uint64_t turn, *turns[2], *places[2];   /* by rank, receiving and sending: see carry.c */
    struct piece *pieces;
    const struct piece **parts;             /* of sums, by node */
    struct pollfd *polled;
    struct held_up held_up;
    _Atomic bool tells;                     /* the others of the end of the group: */
    struct head *told;
    pthread_mutex_t telling;
};

static inline int ff_world(const ff_group *group, int local)
{
    const struct nodes *nodes = group->nodes;
    return nodes ? nodes->members[nodes->begins[nodes->node] + local] : local;
}

static inline int ff_local(const ff_group *group, int rank)    /* -1: on another node */
{
    const struct nodes *nodes = group->nodes;
    return !nodes ? rank : nodes->node_of[rank] == nodes->node ? nodes->place[rank] : -1;
}

static inline int ff_own(const ff_group *group)
{
    return group->nodes ? group->nodes->rank : group->rank;
}

static inline int ff_size(const ff_group *group)
{
    return group->nodes ? group->nodes->ranks : group->ranks;
}

static inline size_t least(size_t a, size_t b)
{
    return a < b ? a : b;
}

static inline void copy(void *to, const void *from, size_t bytes)
{
    if (bytes && to != from)
        memcpy(to, from, bytes);
}

static inline size_t block_bytes(const struct run *run)
{
    return run->call->count * run->size;
}

static inline const char *block_in(const struct run *run, int rank)
{
    const ff_call *call = run->call;
    return call->ins ? call->ins[rank] : (const char *)call->in + (size_t)rank * block_bytes(run);
}

static inline char *block_out(const struct run *run, int rank)
{
    const ff_call *call = run->call;
    return call->outs ? call->outs[rank] : (char *)call->out + (size_t)rank * block_bytes(run);
}

static inline bool wants_result(const struct run *run)
{
    return run->call->kind != FF_REDUCE || run->call->root == ff_own(run->group);
}

/* What is polled of a stream that leads to another rank: both, so that it can be told from one that comes from there. */
#define TOLD (POLLIN | POLLPRI)

static inline bool tells(const struct pollfd *polled)
{
    return (polled->events & TOLD) == TOLD && polled->revents & (TOLD | POLLERR | POLLHUP);
}

struct stream *ff_stream(const ff_group *group, int lane, int rank);
int ff_stream_to(ff_group *group, int lane, int rank);
void ff_stream_ended(struct stream *stream);
void ff_stream_failed(struct stream *stream);
int ff_stream_end(const ff_group *group, int rank);
bool ff_stream_never_came(const ff_group *group, int lane, int rank);
int ff_stream_unreachable(ff_group *group, int rank, ff_report *report);
long ff_stream_send(ff_group *group, struct stream *stream, const struct head *head, size_t *head_at,
                    const char *data, size_t bytes, size_t left);
long ff_stream_receive(ff_group *group, struct stream *stream, struct head *head, size_t *head_at,
                       char *data, size_t bytes);
int ff_stream_lost(ff_group *group, int lane, int rank, ff_report *report);
void ff_streams_hear(ff_group *group);
void ff_streams_tell_of(ff_group *group);
void ff_streams_close(ff_group *group);

/* mpi.c: by MPI, as sendmsg and recvmsg do it by sockets */
int ff_mpi_tag(void);
struct mpi_out *ff_mpi_out(int to, int tag);
struct mpi_in *ff_mpi_in(int from, int tag);
ssize_t ff_mpi_send(struct mpi_out *out, const struct iovec *parts, int count);
ssize_t ff_mpi_receive(struct mpi_in *in, int socket, const struct iovec *parts, int count);
void ff_mpi_end(struct mpi_out *out, const struct head *last);
void ff_mpi_let_go(struct mpi_out *out, int socket);
void ff_mpi_close(struct mpi_in *in);
uint64_t ff_mpi_nap_ns(int naps);

/* carry.c, nodes.c: collectives of several nodes */
bool ff_pieces_open(struct nodes *nodes);
int ff_execute_on_nodes(struct run *run);

/* waiting.c */
uint64_t ff_now_ns(void);
uint64_t ff_deadline_ns(double timeout_s);
uint64_t ff_deadline_after(uint64_t now_ns, double timeout_s);
struct patience ff_patience(const ff_group *group, uint64_t deadline_ns, bool background);
bool ff_bide(struct patience *patience);
bool ff_nap(pthread_cond_t *until, pthread_mutex_t *lock, uint64_t posted_ns);
void ff_condition(pthread_cond_t *condition);
void ff_futex_wake(_Atomic uint32_t *word);
void ff_futex_wait(_Atomic uint32_t *word, uint32_t value, uint64_t ns);

/* failure.c */
bool ff_has_ended(const ff_group *group, int rank);
bool ff_is_ending(const ff_group *group, int rank);
void ff_break(ff_group *group, uint64_t told);
int ff_give_up(ff_group *group, ff_report *report, int status);
bool ff_is_broken(ff_group *group, ff_report *report);
void ff_miss(ff_report *report, int rank);      /* of all nodes */
uint32_t ff_what(const ff_call *call);

/* rounds.c */
char *ff_staging(const ff_group *group, int rank, uint32_t round);
struct post *ff_posted(const ff_group *group, int rank, uint32_t round);
int ff_turn(struct run *run);

/* reach.c */
uint64_t ff_place(const ff_group *group, const void *data, size_t bytes);
bool ff_offer(struct run *run, const void *data, size_t bytes);
struct view ff_view(const ff_group *group, int rank, uint64_t place, uint64_t address);
int ff_look(struct run *run, uint32_t round, struct view *views);
bool ff_sees(const struct view *view);
int ff_unreadable(struct run *run, int rank);
int ff_read_from(const ff_group *group, const struct view *view, size_t at, void *to, size_t bytes);
int ff_fetch(struct run *run, const struct view *view, size_t at, const void *staged, void *to, size_t bytes);
int ff_part(struct run *run);

/* sums.c */
/* Reduce `count` elements of every rank of the node into `out`, which may be one of them. */
void ff_add(const struct run *run, void *out, const void *const *sources, size_t count);
int ff_sum_in_place(struct run *run, size_t bytes, const struct view *views);
int ff_sum_blocks(struct run *run, size_t bytes, const struct view *views);

/* collectives.c, transfers.c */
int ff_execute(struct run *run);
int ff_run_all_reduce(struct run *run);
int ff_run_reduce_scatter(struct run *run);
int ff_run_broadcast(struct run *run);
int ff_run_all_gather(struct run *run);
int ff_run_gather(struct run *run);
int ff_run_scatter(struct run *run);
int ff_run_all_to_all(struct run *run);
int ff_run_barrier(struct run *run);

/* queue.c */
int ff_queue_open(ff_group *group);
void ff_queue_close(ff_group *group);

/* messages.c, rings.c */
void ff_ring_bell(ff_group *group, int local);
int ff_messages_open(ff_group *group);
void ff_messages_close(ff_group *group);

/* reduce.c, built once per set of instructions. Sums `n` sources in the order of a binary tree; a mean is over `ranks`.
 * `out` may be one of the sources.
 *
 * 16-bit floats are summed in float and rounded once: of some of the ranks only, their sum is left in float. */
typedef void (*ff_reduce)(void *out, const void *const *sources, int n, int ranks, size_t count);
ff_reduce ff_reduction_of(uint32_t dtype, uint32_t reduction);
ff_reduce ff_reduction_of_some(uint32_t dtype, uint32_t reduction);
ff_reduce ff_reduction_of_parts(uint32_t dtype, uint32_t reduction);

#endif
