/* The C core of Fivefold: collectives and messages between processes, through memory that those of a node share
 * and streams between nodes.
 *
 * Plain C11 without torch or Python: fivefold.arena loads the library with ctypes, one build serves every
 * version of both. All functions may be called from several threads, except those that open and close.
 *
 *     a group's memory, one segment that every rank maps
 *     +--------+-------------------+-----------------------+-----------------------------+
 *     | header | posts: 2 per rank | staging: 2 per rank   | rings: one per ordered pair |
 *     +--------+-------------------+-----------------------+-----------------------------+
 */
#ifndef FIVEFOLD_H
#define FIVEFOLD_H

#include <stddef.h>
#include <stdint.h>

#define FF_API __attribute__((visibility("default")))
#define FF_ABI 11         /* raised when anything in this file changes; Python compares it */
#define FF_MAX_LOCAL 256  /* ranks of a node */
#define FF_MAX_RANKS 4096
#define FF_MISSING 7      /* so many are named */
#define FF_MAX_RAILS 8    /* between two ranks */

enum ff_kind {
    FF_ALLREDUCE, FF_REDUCE, FF_BROADCAST, FF_ALLGATHER, FF_GATHER, FF_SCATTER, FF_REDUCE_SCATTER,
    FF_ALLTOALL, FF_ALLTOALLV, FF_BARRIER, FF_KINDS
};
enum ff_dtype {
    FF_U8, FF_I8, FF_U16, FF_I16, FF_U32, FF_I32, FF_U64, FF_I64, FF_BOOL, FF_F16, FF_BF16, FF_F32,
    FF_F64, FF_DTYPES
};
enum ff_reduction { FF_SUM, FF_AVG, FF_PROD, FF_MIN, FF_MAX, FF_BAND, FF_BOR, FF_BXOR, FF_REDUCTIONS };

enum ff_status {
    FF_OK,
    FF_TIMEOUT,      /* `missing` did not come in time; on several nodes: of `other_bytes` that were to come from rank
                      * `other`, or to go to it (`other_root`: 1), `other_count` had moved */
    FF_DIED,         /* the process of `missing` has ended */
    FF_LEFT,         /* `missing` has closed the group */
    FF_BROKEN,       /* rank `other` gave up before: `other_status`, `missing` */
    FF_MISMATCH,     /* rank `other` asked for something else: `other_*`; or sent `other_count` bytes of `other_dtype` */
    FF_TOO_LONG,     /* rank `other` sent `other_count` bytes, more than the buffer holds */
    FF_TOO_SHORT,    /* rank `other` sent `other_count` bytes, fewer than the buffer holds */
    FF_UNSUPPORTED,  /* this dtype has no such reduction */
    FF_NO_MEMORY,    /* or what `missing` has sent, and nobody receives, takes a quarter of the node's */
    FF_CLOSED,       /* this rank closed the group meanwhile */
    FF_UNREADABLE,   /* the memory of `missing`, which could be read before, cannot any more */
    FF_CUT_OFF,      /* the node of `missing` acknowledges nothing */
    FF_UNREACHABLE,  /* no stream to `missing` could be opened */
    FF_DAMAGED       /* what `missing` sent makes no sense */
};

/* When all had come, what went wrong, and who is missing: how many, and the first of them that were found. Small, since
 * callers clear one for each operation. */
typedef struct ff_report {
    uint32_t status;
    int32_t other;
    uint32_t other_kind, other_dtype, other_reduction;
    int32_t other_root;
    uint64_t other_count, other_bytes;
    uint32_t other_status;
    uint32_t kind;
    uint64_t sequence;          /* number of the operation in its group, from 0 */
    uint64_t started_ns;        /* of a collective: when the last rank came to it, by CLOCK_MONOTONIC; the same on all
                                 * ranks. 0: not all came */
    uint32_t missing_count;
    int32_t missing[FF_MISSING];
} ff_report;

/* A row of a trace, as fivefold.trace.schema describes it: little-endian, like every machine that torch runs on. */
typedef struct ff_event {
    _Atomic uint64_t seq;
    int64_t begin_ns;
    _Atomic int64_t end_ns;
    int64_t blocked_ns, start_ns, cpu_ns, size_bytes;
    uint32_t number, step;
    uint64_t what;              /* kind, tag, phase, group, dtype: a byte each; 0; peer, two bytes */
} ff_event;

/* Where an operation that is run now is recorded, and as what; nothing is where `row` is NULL. */
typedef struct ff_note {
    ff_event *row;
    uint64_t seq;
    int64_t size_bytes;
    uint32_t number, step;
    uint64_t what;
} ff_note;

/* One collective. A block is what one rank contributes or receives: `count` elements.
 *
 * kind            in                        out
 * ALLREDUCE       one block                 one block, may be `in`
 * REDUCE          one block                 one block at the root, may be `in`; else ignored
 * BROADCAST       one block, at the root    one block; at the root ignored
 * ALLGATHER       one block                 a block per rank
 * GATHER          one block                 a block per rank at the root
 * SCATTER         a block per rank at root  one block
 * REDUCE_SCATTER  a block per rank          one block
 * ALLTOALL        a block per rank          a block per rank
 * ALLTOALLV       a block per rank          a block per rank, of in_counts[q] and out_counts[q] elements
 *
 * "A block per rank" lies in one piece behind `in` or `out`, or block q behind ins[q] or outs[q].
 */
typedef struct ff_call {
    uint32_t kind, dtype, reduction;
    int32_t root;
    uint64_t count;
    const void *in;
    void *out;
    const void *const *ins;
    void *const *outs;
    const uint64_t *in_counts, *out_counts;
    double timeout_s;
    ff_note note;               /* of ff_run alone */
} ff_call;

typedef struct ff_group ff_group;
typedef struct ff_op ff_op;
typedef struct ff_message ff_message;

FF_API uint32_t ff_abi(void);
FF_API const char *ff_instructions(void);  /* which build of the reductions runs: "avx512", ... */
FF_API size_t ff_dtype_bytes(uint32_t dtype);

/* Groups. `memory` has ff_group_bytes(...) zeroed bytes; one rank sets it up before the others open it. */
FF_API size_t ff_group_bytes(int ranks, size_t staging, size_t ring);
FF_API int ff_group_set_up(void *memory, int ranks, size_t staging, size_t ring);
/* `crowded`: more ranks than cores, so waiting must not keep a core. Returns NULL without memory. */
FF_API ff_group *ff_group_open(void *memory, int rank, int crowded);
/* How to notice the end of a peer (pidfd, or -1), and where its arena is mapped here (or NULL). */
FF_API void ff_group_peer(ff_group *group, int rank, int pidfd, void *arena, size_t arena_bytes);
/* Find out, once all ranks have opened the group, whether each may read the memory of each (see reach.c); large
 * tensors then need not be staged. Collective. FF_OK either way: if rank `other` may not read that of rank
 * `other_root`, `other_count` is the errno that it got. */
FF_API int ff_group_probe(ff_group *group, double timeout_s, ff_report *report);
/* Sums over the ranks of one node are made one rank after the other from here on, and rounded after each, as one process
 * adds what comes one after the other; else in the order of a tree. All ranks call it between the same operations. */
FF_API void ff_group_in_order(ff_group *group);
FF_API void ff_group_break(ff_group *group);  /* every rank that waits gives up */
FF_API void ff_group_close(ff_group *group);

/* Ranks on several nodes: the group that was opened is that of this node's ranks, in their order. `node_of` has the
 * node of each of `ranks` ranks, from 0 in the order of their first ranks; this one is `rank`. From here on ranks are
 * those of all nodes. `connect` opens the stream to a rank that something is to be sent to, a connected socket, or
 * returns 0 or less; it is called in whatever thread sends. `tag`: of what MPI carries, or -1. `wakers` are descriptors of events (eventfd), one per rank of
 * this node. Large tensors of collectives go by `rails` streams at a time, the first of which is lane FF_COLLECTIVES and
 * the others FF_LANES and up. `rounds`: each node rounds its part of a sum of 16-bit floats, which then travels as they do
 * and not as floats. Sums of up to 16 KiB, and gathers of up to 64 KiB in all, of `direct_bytes` of each rank or more are
 * made by doubling, others of so few bytes go straight from each node to each. All descriptors are the group's from now on. Returns 0, or -1 without memory. */
enum ff_lane { FF_COLLECTIVES, FF_MESSAGES, FF_LANES };
typedef int (*ff_connect)(void *self, int rank, int lane, int tag);
FF_API int ff_group_spread(ff_group *group, int rank, int ranks, const int32_t *node_of, ff_connect connect,
                           void *self, const int *wakers, int rails, int rounds, uint64_t direct_bytes);
/* A stream that `rank` has opened to this one, one call at a time. Returns 0, or -1 if there is one already, or no
 * memory: the caller closes it. */
FF_API int ff_group_accept(ff_group *group, int rank, int lane, int descriptor, int tag);
/* In a forked child, which is no rank: close its copies of the streams, which would outlive the parent. */
FF_API void ff_group_forget(ff_group *group);

/* What streams carry may go by MPI (see mpi.c), whose functions and handles Python finds. Streams then are sockets as
 * before, which tell of the end of either side. */
typedef struct {
    void *send, *receive, *test, *count, *cancel;  /* MPI_Isend, MPI_Irecv, MPI_Test, MPI_Get_count, MPI_Cancel */
    uint64_t comm, byte;        /* handles: pointers, or else ints */
    int32_t pointers;
    int32_t tags;               /* as many there are, from 0 on */
} ff_mpi;

FF_API void ff_mpi_use(const ff_mpi *mpi);  /* once, before groups */
/* Before MPI_Finalize, once all groups are closed: waits for what is under way. Returns how many streams still wait for
 * their other side. */
FF_API int ff_mpi_finish(double timeout_s);
/* After ff_group_spread: `mpi_ranks` has the rank in the communicator of each rank. Returns 0, or -1 without memory. */
FF_API int ff_group_by_mpi(ff_group *group, const int32_t *mpi_ranks);

/* Collectives: run one now, or post it and wait later. All ranks start them in one order. */
FF_API int ff_run(ff_group *group, const ff_call *call, ff_report *report);
FF_API int ff_all_reduce(ff_group *group, uint32_t dtype, uint32_t reduction, uint64_t count, void *data,
                         double timeout_s, ff_report *report);
FF_API int ff_all_reduce_noted(ff_group *group, uint32_t dtype, uint32_t reduction, uint64_t count, void *data,
                               double timeout_s, ff_report *report, ff_event *row, uint64_t seq,
                               uint32_t number, uint32_t step, uint64_t what);
/* Whether a collective waits for another node now, from any thread: for which rank (`other`), 1 in `other_root` where it
 * takes too little, else it sends too little, and how many bytes (`other_count`) of how many (`other_bytes`) have moved. */
FF_API int ff_held_up(ff_group *group, ff_report *report);
FF_API ff_op *ff_post(ff_group *group, const ff_call *call);
FF_API int ff_op_done(ff_op *op);
FF_API int ff_wait(ff_group *group, ff_op *op, double timeout_s, ff_report *report);
FF_API void ff_op_free(ff_group *group, ff_op *op);

/* Messages between two ranks, matched by tag in the order in which they are posted; peer -1 receives from
 * anyone. `dtype` is any number: one that was sent with another does not come to its receiver, who is told so.
 * A message must be waited for, or done, before it is freed. What has gone before ff_send returns is ff_gone(),
 * which need not be. */
FF_API ff_message *ff_gone(void);
FF_API ff_message *ff_send(ff_group *group, int peer, int32_t tag, uint32_t dtype, const void *data,
                           uint64_t bytes, double timeout_s);
FF_API ff_message *ff_receive(ff_group *group, int peer, int32_t tag, uint32_t dtype, void *data,
                              uint64_t bytes, double timeout_s);
FF_API int ff_message_done(ff_group *group, ff_message *message);
FF_API int ff_message_wait(ff_group *group, ff_message *message, double timeout_s, ff_report *report);
FF_API int ff_message_peer(const ff_message *message);
FF_API void ff_message_free(ff_group *group, ff_message *message);

/* Slots: pieces of equal size whose holders are known, so that the references of a dead one can be
 * dropped. `memory` has ff_slots_bytes(slots) zeroed bytes in a shared segment. */
FF_API size_t ff_slots_bytes(uint32_t slots);
FF_API int ff_slots_set_up(void *memory, uint32_t slots);
FF_API int ff_slots_join(void *memory, uint32_t pid);    /* a holder's number, or -1: all 64 are taken */
FF_API void ff_slots_leave(void *memory, int holder);    /* drops all that it holds; for the dead, too */
FF_API uint32_t ff_slots_holder(void *memory, int holder);  /* pid, or 0 */
FF_API int ff_slot_take(void *memory, int holder, double timeout_s);  /* a free slot, or -1 */
FF_API int ff_slot_hold(void *memory, int slot, int holder);          /* 0 if nobody held it any more */
FF_API void ff_slot_drop(void *memory, int slot, int holder);
FF_API uint64_t ff_slot_holders(void *memory, int slot);

/* Words in shared memory that one side sets and others wait for. */
FF_API uint32_t ff_word_read(void *word);
FF_API void ff_word_set(void *word, uint32_t value);    /* and wakes who waits */
/* Waits while the word is `value`; 0 when it changed, FF_TIMEOUT otherwise. */
FF_API int ff_word_wait(void *word, uint32_t value, double timeout_s);

#endif
