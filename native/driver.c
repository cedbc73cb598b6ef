/* Every operation of the core, with threads as ranks, against a serial reference. Built with the thread or
 * the address sanitizer by `make sanitize`; without, it runs in a second.
 *
 *     driver [ranks [rounds [seed [nodes [rails [direct bytes [mpi]]]]]]]
 *
 * Nodes are groups of threads with a memory of their own, and socket pairs between them, or an MPI.
 */
#define _GNU_SOURCE
#include "fivefold.h"
#include "mpi_of_threads.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { STAGING = 16 * 1024, RING = 8 * 1024, MOST = 40000, SLOTS = 8 };

enum { MOST_RANKS = 64 };
static int ranks = 4, rounds = 150, nodes = 1, rails = 1;
static uint64_t direct_bytes = 100;
static bool by_mpi;
static unsigned seed = 1;
static void *memory, *narrow, *flooded, *arenas[MOST_RANKS];
static size_t arena_bytes;
static void *slots;
static uint64_t came_ns[MOST_RANKS];

/* Groups of several nodes, one after the other; ranks meet between them. */
static int32_t node_of[MOST_RANKS];
static int members[MOST_RANKS];
static void *memories[MOST_RANKS];
static ff_group *groups[MOST_RANKS];
static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;
static pthread_barrier_t meeting;
static int wakers[MOST_RANKS];

#define CHECK(condition, ...)                                                                       \
    do {                                                                                            \
        if (!(condition)) {                                                                         \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition);                         \
            fprintf(stderr, __VA_ARGS__);                                                           \
            fputc('\n', stderr);                                                                    \
            abort();                                                                                \
        }                                                                                           \
    } while (0)

static bool misses(const ff_report *report, int rank)
{
    for (uint32_t i = 0; i < report->missing_count && i < FF_MISSING; i++)
        if (report->missing[i] == rank)
            return true;
    return false;
}

static void *zeroed(size_t bytes)
{
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(at != MAP_FAILED, "no memory");
    return at;
}

/* All ranks draw the same numbers. */
static unsigned draw(unsigned *state, unsigned below)
{
    *state = *state * 1664525u + 1013904223u;
    return (*state >> 8) % below;
}

/* Element i of what rank r contributes to block q in round k: small, so that float sums are exact. */
static float value(int k, int r, int q, size_t i)
{
    return (float)((k * 7 + r * 31 + q * 13 + (int)(i % 1009)) % 97 - 48);
}

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

static float expected_sum(int k, int q, size_t i)
{
    float sum = 0;
    for (int r = 0; r < ranks; r++)
        sum += value(k, r, q, i);
    return sum;
}

struct rank {
    int rank;
    ff_group *group;
    float *in, *out;
    uint64_t in_counts[MOST_RANKS], out_counts[MOST_RANKS];
};

static void fill(struct rank *own, int k, size_t count, int blocks)
{
    for (int q = 0; q < blocks; q++)
        for (size_t i = 0; i < count; i++)
            own->in[(size_t)q * count + i] = value(k, own->rank, q, i);
}

/* Element i of block q of the result of this rank. */
static float expected(const ff_call *call, int rank, int k, int q, size_t i)
{
    switch (call->kind) {
    case FF_ALLREDUCE:
    case FF_REDUCE: return expected_sum(k, 0, i);
    case FF_REDUCE_SCATTER: return expected_sum(k, rank, i);
    case FF_BROADCAST: return value(k, call->root, 0, i);
    case FF_SCATTER: return value(k, call->root, rank, i);
    case FF_ALLGATHER:
    case FF_GATHER: return value(k, q, 0, i);
    default: return value(k, q, rank, i);
    }
}

static bool has_blocks_in(unsigned kind)
{
    return kind == FF_SCATTER || kind == FF_REDUCE_SCATTER || kind == FF_ALLTOALL;
}

static bool has_blocks_out(unsigned kind)
{
    return kind == FF_ALLGATHER || kind == FF_GATHER || kind == FF_ALLTOALL;
}

static void verify(const struct rank *own, const ff_call *call, int k)
{
    bool rooted = call->kind == FF_REDUCE || call->kind == FF_GATHER;
    if (call->kind == FF_BARRIER || (rooted && call->root != own->rank))
        return;
    if (call->kind == FF_BROADCAST && call->root == own->rank)
        return;
    const float *out = call->out;
    for (int q = 0; q < (has_blocks_out(call->kind) ? ranks : 1); q++)
        for (size_t i = 0; i < call->count; i++)
            CHECK(out[(size_t)q * call->count + i] == expected(call, own->rank, k, q, i),
                  "kind %u count %llu rank %d block %d element %zu", call->kind,
                  (unsigned long long)call->count, own->rank, q, i);
}

static ff_call drawn(struct rank *own, unsigned *state)
{
    static const unsigned sizes[] = {1, 20, 100, 2048, 5000, MOST};
    unsigned size = sizes[draw(state, 6)];
    ff_call call = {.kind = draw(state, FF_BARRIER + 1), .dtype = FF_F32, .reduction = FF_SUM};
    if (call.kind == FF_ALLTOALLV)
        call.kind = FF_ALLTOALL;
    call.root = (int)draw(state, (unsigned)ranks);
    call.count = draw(state, size + 1);
    static const unsigned none = 0, all = ~0u;
    const unsigned in_arena[] = {none, all, draw(state, 1u << (ranks % 24))};   /* one bit per rank */
    bool here = nodes == 1 && in_arena[draw(state, 3)] >> own->rank & 1;
    bool in_place = call.kind == FF_ALLREDUCE || call.kind == FF_REDUCE;
    call.in = here ? arenas[own->rank] : own->in;
    call.out = here && in_place ? arenas[own->rank] : own->out;
    call.timeout_s = 60;
    return call;
}

static void collectives(struct rank *own)
{
    unsigned state = seed;
    for (int k = 0; k < rounds; k++) {
        ff_call call = drawn(own, &state);
        ff_report report = {0};
        unsigned later = draw(&state, 2);
        fill(own, k, call.count, has_blocks_in(call.kind) ? ranks : 1);
        if (call.in == arenas[own->rank])
            memcpy(arenas[own->rank], own->in,
                   call.count * sizeof(float) * (has_blocks_in(call.kind) ? (size_t)ranks : 1));
        if (later) {
            ff_op *op = ff_post(own->group, &call);
            if (draw(&state, 2))
                while (!ff_op_done(op)) ;
            ff_wait(own->group, op, -1, &report);
            ff_op_free(own->group, op);
        } else {
            ff_run(own->group, &call, &report);
        }
        CHECK(report.status == FF_OK, "kind %u: status %u", call.kind, report.status);
        verify(own, &call, k);
        if (call.kind == FF_REDUCE && call.root != own->rank)
            for (size_t i = 0; i < call.count; i++)
                CHECK(((const float *)call.in)[i] == value(k, own->rank, 0, i), "not the root's");
    }
}

/* Uneven blocks; then, on one node, blocks that two ranks disagree about. */
static void uneven(struct rank *own)
{
    ff_report report = {0};
    uint64_t at = 0;
    int unit = ranks > 16 ? 300 : 1500;
    for (int q = 0; q < ranks; q++) {
        own->in_counts[q] = (uint64_t)(own->rank * 100 + q * unit);
        own->out_counts[q] = (uint64_t)(q * 100 + own->rank * unit);
        for (uint64_t i = 0; i < own->in_counts[q]; i++)
            own->in[at++] = value(0, own->rank, q, i);
    }
    ff_call call = {.kind = FF_ALLTOALLV, .dtype = FF_F32, .in = own->in, .out = own->out,
                    .in_counts = own->in_counts, .out_counts = own->out_counts, .timeout_s = 60};
    CHECK(ff_run(own->group, &call, &report) == FF_OK, "status %u", report.status);
    at = 0;
    for (int q = 0; q < ranks; q++)
        for (uint64_t i = 0; i < own->out_counts[q]; i++)
            CHECK(own->out[at++] == value(0, q, own->rank, i), "from %d", q);
    own->out_counts[0] += own->rank == 1;
    if (nodes == 1)
        CHECK(ff_run(own->group, &call, &report) == FF_MISMATCH, "status %u", report.status);
}

static void mismatch(struct rank *own)
{
    ff_report report = {0};
    ff_call call = {.kind = own->rank == 1 ? FF_BROADCAST : FF_ALLREDUCE, .dtype = FF_F32,
                    .count = 10, .in = own->in, .out = own->out, .timeout_s = 60};
    CHECK(ff_run(own->group, &call, &report) == FF_MISMATCH, "status %u", report.status);
    CHECK(report.started_ns == 0, "they did not come to the same");
    CHECK(report.other >= 0 && report.other_kind != call.kind, "other %d", report.other);
}

/* All ranks know when the last of them came: to a sum that runs at once, or to several that are under way. */
static void arrivals(struct rank *own)
{
    static const size_t counts[] = {0, 7, 21, 5000, MOST};
    enum { SUMS = sizeof counts / sizeof *counts };
    for (int late = 0; late < ranks; late++) {
        ff_op *ops[SUMS];
        uint64_t started_ns[SUMS], all_ns[SUMS * MOST_RANKS];
        ff_event row = {.end_ns = 7, .cpu_ns = 7};
        ff_report report = {0};
        if (own->rank == late) {
            usleep(2000);
            came_ns[late] = now_ns();       /* read by others only after they have met this rank */
        }
        uint64_t before_ns = now_ns();
        for (int i = 0; i < SUMS; i++) {
            ff_call call = {.kind = FF_ALLREDUCE, .dtype = FF_F32, .count = counts[i], .in = own->in, .out = own->out,
                            .timeout_s = late % 2 ? 60 : -1, .note = {&row, (uint64_t)i + 5, 4, 3, 2, 1}};
            if (late == 0) {
                CHECK(ff_run(own->group, &call, &report) == FF_OK, "status %u", report.status);
                CHECK(row.seq == (uint64_t)i + 5 && row.size_bytes == 4 && row.number == 3 && row.step == 2 &&
                      row.what == 1 && row.cpu_ns == 0, "the row of number %d", i);
                CHECK(row.start_ns == (int64_t)report.started_ns && row.blocked_ns == row.end_ns - row.begin_ns &&
                      row.begin_ns <= row.start_ns && row.start_ns <= row.end_ns, "its times");
            } else {
                ops[i] = ff_post(own->group, &call);
            }
            started_ns[i] = report.started_ns;
        }
        for (int i = 0; i < SUMS && late; i++) {
            CHECK(ff_wait(own->group, ops[i], -1, &report) == FF_OK, "status %u", report.status);
            ff_op_free(own->group, ops[i]);
            started_ns[i] = report.started_ns;
        }
        for (int i = 0; i < SUMS; i++)
            CHECK(started_ns[i] >= came_ns[late] && started_ns[i] >= (i ? started_ns[i - 1] : before_ns) &&
                  started_ns[i] <= now_ns(), "late %d number %d", late, i);
        ff_call call = {.kind = FF_ALLGATHER, .dtype = FF_U64, .count = SUMS, .in = started_ns, .out = all_ns,
                        .timeout_s = 60};
        CHECK(ff_run(own->group, &call, &report) == FF_OK, "status %u", report.status);
        for (int i = 0; i < SUMS * ranks; i++)
            CHECK(all_ns[i] == started_ns[i % SUMS], "rank %d number %d", i / SUMS, i % SUMS);
    }
}

/* To everyone else, several sizes, received in the opposite order of tags, one of them from anyone. */
static void messages(struct rank *own, bool in_arena)
{
    static const size_t counts[] = {0, 5, 3000, MOST / 2};
    enum { TAGS = 4 };
    ff_message *sent[MOST_RANKS][TAGS];
    ff_report report = {0};
    float *data = in_arena ? arenas[own->rank] : own->in;
    for (size_t i = 0; i < MOST; i++)
        data[i] = value(1, own->rank, 0, i);
    for (int q = 0; q < ranks; q++)
        for (int tag = 0; tag < TAGS; tag++)
            sent[q][tag] = ff_send(own->group, q, tag, FF_F32, data, counts[tag] * sizeof(float), 60);
    for (int tag = TAGS - 1; tag >= 0; tag--)
        for (int q = 0; q < ranks; q++) {
            ff_message *got = ff_receive(own->group, tag == 1 ? -1 : q, tag, FF_F32, own->out,
                                         counts[tag] * sizeof(float), 60);
            CHECK(ff_message_wait(own->group, got, -1, &report) == FF_OK, "status %u", report.status);
            int from = ff_message_peer(got);
            for (size_t i = 0; i < counts[tag]; i++)
                CHECK(own->out[i] == value(1, from, 0, i), "from %d tag %d element %zu", from, tag, i);
            ff_message_free(own->group, got);
        }
    for (int q = 0; q < ranks; q++)
        for (int tag = 0; tag < TAGS; tag++) {
            CHECK(ff_message_wait(own->group, sent[q][tag], -1, &report) == FF_OK, "sent to %d", q);
            ff_message_free(own->group, sent[q][tag]);
        }
}

static void share_slots(struct rank *own)
{
    int holder = ff_slots_join(slots, (uint32_t)own->rank + 1);
    CHECK(holder >= 0, "no holder");
    for (int i = 0; i < 200; i++) {
        int slot = ff_slot_take(slots, holder, 60);
        CHECK(slot >= 0 && ff_slot_holders(slots, slot) == UINT64_C(1) << holder, "slot %d", slot);
        CHECK(ff_slot_hold(slots, slot, holder), "just taken");
        if (i % 7)
            ff_slot_drop(slots, slot, holder);
        else
            ff_slots_leave(slots, holder), holder = ff_slots_join(slots, (uint32_t)own->rank + 1);
    }
    ff_slots_leave(slots, holder);
}

/* One leaves; the others notice at once, though the time limit is far. */
static void leave(struct rank *own)
{
    ff_report report = {0};
    ff_call call = {.kind = FF_BARRIER, .timeout_s = 600};
    if (own->rank != ranks - 1) {
        int status = ff_run(own->group, &call, &report);
        CHECK(status == FF_LEFT || status == FF_BROKEN, "status %d", status);
        CHECK(misses(&report, ranks - 1), "missing %u", report.missing_count);
    }
    ff_group_close(own->group);
}

/* From now on large tensors are read where they lie. */
static void probe(struct rank *own)
{
    ff_report report = {0};
    CHECK(ff_group_probe(own->group, 60, &report) == FF_OK, "status %u", report.status);
    CHECK(report.other_count == 0, "rank %d cannot read rank %d: errno %llu", report.other,
          report.other_root, (unsigned long long)report.other_count);
}

static ff_group *opened(const struct rank *own, void *of, size_t theirs)
{
    ff_group *group = ff_group_open(of, own->rank, 1);
    CHECK(group, "no memory");
    for (int q = 0; q < ranks; q++)
        ff_group_peer(group, q, -1, arenas[q], q == own->rank ? arena_bytes : theirs);
    if (seed % 2)
        ff_group_in_order(group);
    return group;
}

/* What others claim to have beyond what is mapped of their arenas is not read, nor written. */
static void beyond(struct rank *own)
{
    static const uint32_t kinds[] = {FF_ALLREDUCE, FF_ALLGATHER, FF_REDUCE_SCATTER, FF_ALLTOALL, FF_BROADCAST};
    ff_group *group = opened(own, narrow, 64);
    ff_call call = {.kind = kinds[seed % 5], .dtype = FF_F32, .count = MOST, .in = arenas[own->rank], .timeout_s = 60};
    call.out = call.kind == FF_ALLREDUCE ? arenas[own->rank] : own->out;
    ff_report report = {0};
    int status = ff_run(group, &call, &report);
    bool reads = call.kind != FF_BROADCAST || own->rank != call.root;
    CHECK(status == FF_UNREADABLE || status == FF_BROKEN || !reads, "kind %u: status %d", call.kind, status);
    ff_group_close(group);
}

/* Messages that nobody receives end the group, once they are too many, and not the process. */
static void flood(struct rank *own)
{
    enum { TIMES = 40 };
    ff_group *group = opened(own, flooded, arena_bytes);
    ff_message *sent[TIMES];
    ff_report report = {0};
    for (int i = 0; i < TIMES && own->rank == 0; i++)
        sent[i] = ff_send(group, 1, 1, FF_F32, own->in, MOST * sizeof(float), 60);
    if (own->rank == 1) {
        ff_message *never = ff_receive(group, 0, 2, FF_F32, own->out, 4, 60);
        CHECK(ff_message_wait(group, never, -1, &report) == FF_BROKEN, "status %u", report.status);
        CHECK(report.other == 1 && report.other_status == FF_NO_MEMORY && misses(&report, 0),
              "other %d: %u, missing %u", report.other, report.other_status, report.missing_count);
        ff_message_free(group, never);
    }
    for (int i = 0; i < TIMES && own->rank == 0; i++) {
        ff_message_wait(group, sent[i], -1, &report);
        ff_message_free(group, sent[i]);
    }
    CHECK(own->rank != 0 || report.other_status == FF_NO_MEMORY, "status %u", report.status);
    ff_group_close(group);
}

/* ---- several nodes */

static int connect_to(void *self, int rank, int lane, int tag)
{
    int pair[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair) == 0, "no sockets");
    pthread_mutex_lock(&opening);
    int status = groups[rank] ? ff_group_accept(groups[rank], ((struct rank *)self)->rank, lane, pair[1], tag) : -1;
    pthread_mutex_unlock(&opening);
    if (!status)
        return pair[0];
    close(pair[0]);
    close(pair[1]);
    return -1;
}

static void *memory_of(int members)
{
    void *made = zeroed(ff_group_bytes(members, STAGING, RING));
    CHECK(ff_group_set_up(made, members, STAGING, RING) == 0, "set up");
    return made;
}

static void open_on_nodes(struct rank *own)
{
    int place = 0, mine[MOST_RANKS], count = 0;
    wakers[own->rank] = eventfd(0, EFD_NONBLOCK);
    for (int q = 0; q < own->rank; q++)
        place += node_of[q] == node_of[own->rank];
    if (!place)
        memories[node_of[own->rank]] = memory_of(members[node_of[own->rank]]);
    pthread_barrier_wait(&meeting);
    for (int q = 0; q < ranks; q++)
        if (node_of[q] == node_of[own->rank])
            mine[count++] = dup(wakers[q]);
    own->group = ff_group_open(memories[node_of[own->rank]], place, 1);
    CHECK(own->group, "no memory");
    for (int q = 0; q < count; q++)
        ff_group_peer(own->group, q, -1, NULL, 0);
    CHECK(ff_group_spread(own->group, own->rank, ranks, node_of, connect_to, own, mine, rails, 0, direct_bytes) == 0, "no memory");
    if (by_mpi) {
        int32_t numbers[MOST_RANKS];
        for (int q = 0; q < ranks; q++)
            numbers[q] = q;
        CHECK(ff_group_by_mpi(own->group, numbers) == 0, "no memory");
    }
    groups[own->rank] = own->group;
    pthread_barrier_wait(&meeting);
}

static void close_on_nodes(struct rank *own)
{
    pthread_mutex_lock(&opening);
    groups[own->rank] = NULL;
    pthread_mutex_unlock(&opening);
    ff_group_close(own->group);
}

/* The last rank leaves; whoever needs it learns who, though the time limit is far. */
static void left_on_nodes(struct rank *own)
{
    ff_report report = {0};
    ff_call call = {.kind = rails > 1 ? FF_BROADCAST : FF_BARRIER, .dtype = FF_F32, .root = rails > 1 ? ranks - 1 : 0,
                    .count = rails > 1 ? MOST : 0, .out = own->out, .timeout_s = 600};
    if (own->rank != ranks - 1) {
        int status = ff_run(own->group, &call, &report);
        CHECK(status == FF_LEFT || status == FF_BROKEN || status == FF_UNREACHABLE, "status %d", status);
        CHECK(misses(&report, ranks - 1), "missing %u, status %d of %d", report.missing_count, status,
              report.other_status);
    }
}

/* One asks for something else, and all learn of it, here or in the next operation. */
static void mismatch_on_nodes(struct rank *own)
{
    ff_report report = {0};
    ff_call call = {.kind = own->rank == ranks - 1 ? FF_ALLGATHER : FF_ALLREDUCE, .dtype = FF_F32, .count = 10,
                    .in = own->in, .out = own->out, .timeout_s = 60};
    int status = ff_run(own->group, &call, &report);
    if (!status)
        status = ff_run(own->group, &call, &report);
    CHECK(status == FF_MISMATCH || (status == FF_BROKEN && report.other_status == FF_MISMATCH), "status %d of %d", status,
          report.other_status);
}

/* The last rank does not come: all learn who it was. */
static void late_on_nodes(struct rank *own)
{
    ff_report report = {0};
    ff_call call = {.kind = FF_ALLREDUCE, .dtype = FF_F32, .count = seed % 2 ? 10 : MOST, .in = own->in, .out = own->out,
                    .timeout_s = 2};
    if (own->rank == ranks - 1)
        return;
    int status = ff_run(own->group, &call, &report);
    CHECK(status == FF_TIMEOUT || (status == FF_BROKEN && report.other_status == FF_TIMEOUT), "status %d of %d", status,
          report.other_status);
    CHECK(misses(&report, ranks - 1), "rank %d: missing %u", own->rank, report.missing_count);
}

static void *rank_on_nodes(void *argument)
{
    static void (*const endings[])(struct rank *) = {left_on_nodes, mismatch_on_nodes, late_on_nodes};
    struct rank own = {.rank = (int)(intptr_t)argument};
    own.in = malloc(MOST * sizeof(float) * (size_t)ranks);
    own.out = malloc(MOST * sizeof(float) * (size_t)ranks);
    CHECK(own.in && own.out, "no memory");
    open_on_nodes(&own);
    collectives(&own);
    uneven(&own);
    messages(&own, false);
    collectives(&own);
    close_on_nodes(&own);
    for (int i = 0; i < 3; i++) {
        bool leaves = i == 0 && own.rank == ranks - 1;
        pthread_barrier_wait(&meeting);
        close(wakers[own.rank]);
        open_on_nodes(&own);
        endings[i](&own);
        if (leaves)
            close_on_nodes(&own);
        pthread_barrier_wait(&meeting);     /* nobody else has left before all know */
        if (!leaves)
            close_on_nodes(&own);
    }
    free(own.in);
    free(own.out);
    return NULL;
}

static void lay_out_nodes(void)
{
    CHECK(pthread_barrier_init(&meeting, NULL, (unsigned)ranks) == 0, "no barrier");
    for (int q = 0; q < ranks; q++) {
        node_of[q] = seed % 2 ? q * nodes / ranks : q % nodes;
        members[node_of[q]]++;
    }
}

/* ---- one node */

static void *rank_main(void *argument)
{
    struct rank own = {.rank = (int)(intptr_t)argument};
    own.group = opened(&own, memory, arena_bytes);
    own.in = malloc(MOST * sizeof(float) * (size_t)ranks);
    own.out = malloc(MOST * sizeof(float) * (size_t)ranks);
    CHECK(own.in && own.out, "no memory");
    collectives(&own);
    uneven(&own);
    mismatch(&own);
    arrivals(&own);
    messages(&own, false);
    messages(&own, true);
    probe(&own);
    collectives(&own);
    uneven(&own);
    messages(&own, false);
    share_slots(&own);
    leave(&own);
    beyond(&own);
    flood(&own);
    free(own.in);
    free(own.out);
    return NULL;
}

int main(int count, char **words)
{
    pthread_t threads[MOST_RANKS];
    ranks = count > 1 ? atoi(words[1]) : ranks;
    rounds = count > 2 ? atoi(words[2]) : rounds;
    seed = count > 3 ? (unsigned)atoi(words[3]) : seed;
    nodes = count > 4 ? atoi(words[4]) : nodes;
    rails = count > 5 ? atoi(words[5]) : rails;
    direct_bytes = count > 6 ? strtoull(words[6], NULL, 10) : direct_bytes;
    by_mpi = count > 7 && !strcmp(words[7], "mpi");
    if (by_mpi)
        use_mpi_of_threads();
    CHECK(ranks >= 2 && ranks <= (nodes > 1 ? MOST_RANKS : 16) && nodes <= ranks, "2 to 16 ranks, 64 on several nodes");
    arena_bytes = MOST * sizeof(float) * (size_t)ranks;
    void **shared[] = {&memory, &narrow, &flooded};
    for (int i = 0; i < 3 && nodes == 1; i++)
        *shared[i] = memory_of(ranks);
    slots = zeroed(ff_slots_bytes(SLOTS));
    ff_slots_set_up(slots, SLOTS);
    for (int q = 0; q < ranks; q++)
        arenas[q] = zeroed(arena_bytes);
    if (nodes > 1)
        lay_out_nodes();
    for (int q = 0; q < ranks; q++)
        CHECK(pthread_create(&threads[q], NULL, nodes > 1 ? rank_on_nodes : rank_main, (void *)(intptr_t)q) == 0, "thread");
    for (int q = 0; q < ranks; q++)
        pthread_join(threads[q], NULL);
    CHECK(!by_mpi || ff_mpi_finish(20) == 0, "something is still under way");
    printf("%d ranks, %d nodes, %d collectives, %s: all as expected\n", ranks, nodes, rounds, ff_instructions());
    return 0;
}
