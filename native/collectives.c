/* Collectives that compute: all-reduce, reduce, reduce-scatter; and how any collective is run. */
#include "internal.h"

#include <string.h>

/* While a rank reads no more than this from all others, every rank adds everything, in one round; above, each
 * adds a slice, and they are shared. */
static const size_t WHOLE_BYTES = 16 * 1024;

static size_t share(size_t bytes, size_t parts, size_t unit)
{
    return (bytes + parts * unit - 1) / (parts * unit) * unit;
}

static bool exists(const struct run *run)
{
    return ff_reduction_of(run->call->dtype, run->call->reduction) != NULL;
}

/* If the ranks disagree, that is what they are told. */
static int cannot_reduce(struct run *run)
{
    int status = ff_turn(run);
    return status ? status : FF_UNSUPPORTED;
}

static int reduce_inlined(struct run *run, size_t bytes)
{
    ff_group *group = run->group;
    uint32_t round = group->round;
    const void *sources[FF_MAX_LOCAL];
    memcpy(ff_posted(group, group->rank, round)->inlined, run->call->in, bytes);
    int status = ff_turn(run);
    if (status || !wants_result(run))
        return status;
    for (int q = 0; q < group->ranks; q++)
        sources[q] = ff_posted(group, q, round)->inlined;
    ff_add(run, run->call->out, sources, run->call->count);
    return FF_OK;
}

static int reduce_whole(struct run *run, size_t bytes)
{
    ff_group *group = run->group;
    uint32_t round = group->round;
    const void *sources[FF_MAX_LOCAL];
    memcpy(ff_staging(group, group->rank, round), run->call->in, bytes);
    int status = ff_turn(run);
    if (status || !wants_result(run))
        return status;
    for (int q = 0; q < group->ranks; q++)
        sources[q] = q == group->rank ? run->call->in : ff_staging(group, q, round);
    ff_add(run, run->call->out, sources, run->call->count);
    return FF_OK;
}

/* Where the slices of a message lie: slice q of chunk k, `slice` bytes or what is left of them.
 *
 *     in one piece   | 0.0 | 0.1 | 0.2 | 1.0 | 1.1 | 1.2 |       chunk.slice, three ranks
 *     in blocks      | 0.0 | 1.0 |  | 0.1 | 1.1 |  | 0.2 | 1.2 |
 */
struct slices {
    size_t total;                 /* bytes of the message, or of one block */
    size_t slice, chunks;
    bool in_blocks;
};

static struct slices slices_of(const ff_group *group, size_t total, bool in_blocks)
{
    size_t ranks = in_blocks ? 1 : (size_t)group->ranks;
    size_t room = group->staging_bytes / (size_t)group->ranks / 64 * 64;
    struct slices of = {.total = total, .in_blocks = in_blocks};
    of.chunks = (total + ranks * room - 1) / (ranks * room);
    of.slice = of.chunks ? least(share(total, of.chunks * ranks, 64), room) : 0;
    return of;
}

static size_t slice_at(const struct slices *of, const ff_group *group, size_t chunk, int rank)
{
    size_t at = of->in_blocks ? chunk : chunk * (size_t)group->ranks + (size_t)rank;
    return least(at * of->slice, of->total);
}

static size_t slice_bytes(const struct slices *of, const ff_group *group, size_t chunk, int rank)
{
    size_t at = slice_at(of, group, chunk, rank);
    return least(of->slice, of->total - at);
}

static const char *slice_in(const struct run *run, const struct slices *of, size_t chunk, int rank)
{
    const char *base = of->in_blocks ? block_in(run, rank) : run->call->in;
    return base + slice_at(of, run->group, chunk, rank);
}

static void put_slices(struct run *run, const struct slices *of, size_t chunk)
{
    ff_group *group = run->group;
    char *own = ff_staging(group, group->rank, group->round);
    for (int i = 1; i < group->ranks; i++) {
        int q = (group->rank + i) % group->ranks;
        memcpy(own + (size_t)q * of->slice, slice_in(run, of, chunk, q),
               slice_bytes(of, group, chunk, q));
    }
}

/* Where `rank` has put the part of its chunk that this rank adds. */
static char *part_of(const struct run *run, const struct slices *of, uint32_t round, int rank)
{
    return ff_staging(run->group, rank, round) + (size_t)run->group->rank * of->slice;
}

/* Add this rank's slice of a chunk out of everybody's staging of `round`. */
static void add_slice(struct run *run, const struct slices *of, size_t chunk, uint32_t round, void *out)
{
    ff_group *group = run->group;
    const void *sources[FF_MAX_LOCAL];
    for (int q = 0; q < group->ranks; q++)
        sources[q] = part_of(run, of, round, q);
    sources[group->rank] = slice_in(run, of, chunk, group->rank);
    ff_add(run, out, sources, slice_bytes(of, group, chunk, group->rank) / run->size);
}

/* What is claimed ahead, and stays in the first-level cache from there on. */
static const size_t PIECE_BYTES = 4096;

/* Ask for memory that is going to be written: of what lies `at`, the piece from `begin` on. */
static void claim(const char *at, size_t begin, size_t bytes)
{
    for (size_t i = begin; i < least(begin + PIECE_BYTES, bytes); i += 64)
#if defined(__x86_64__)
        __asm__ volatile("prefetchw %0" : : "m"(at[i]));    /* the compiler would ask to read it */
#else
        __builtin_prefetch(at + i, 1);
#endif
}

/* Add the piece from `at` on of this rank's slice, and put the sum in the place of what was added: into the
 * stagings of those who want it. */
static void replace_piece(struct run *run, char *const *parts, size_t at, size_t bytes)
{
    ff_group *group = run->group;
    bool all = run->call->kind == FF_ALLREDUCE;
    char *sum = parts[group->ranks] + at;
    const void *sources[FF_MAX_LOCAL];
    for (int q = 0; q < group->ranks; q++)
        sources[q] = parts[q] + at;
    ff_add(run, sum, sources, bytes / run->size);
    for (int q = 0; all && q < group->ranks; q++)
        if (q != group->rank)
            memcpy(parts[q] + at, sum, bytes);
}

/* Add this rank's slice of a chunk. Whoever claims what it reads moves a line between two processors' caches once,
 * for reading it and for the sum; so does the owner, who will fill it again. */
static void replace_slice(struct run *run, const struct slices *of, size_t chunk, uint32_t round)
{
    ff_group *group = run->group;
    size_t bytes = slice_bytes(of, group, chunk, group->rank);
    char *parts[FF_MAX_LOCAL + 1];      /* the last: where the result goes */
    for (int q = 0; q < group->ranks; q++)
        parts[q] = part_of(run, of, round, q);
    parts[group->rank] = (char *)slice_in(run, of, chunk, group->rank);
    parts[group->ranks] = wants_result(run)
                              ? (char *)run->call->out + slice_at(of, group, chunk, group->rank)
                              : parts[run->call->root];
    for (size_t ahead = 0; ahead < bytes + PIECE_BYTES; ahead += PIECE_BYTES) {
        for (int q = 0; q < group->ranks; q++)
            if (q != group->rank)
                claim(parts[q], ahead, bytes);
        if (ahead)
            replace_piece(run, parts, ahead - PIECE_BYTES, least(PIECE_BYTES, bytes - (ahead - PIECE_BYTES)));
    }
}

/* Take the sums of the others' slices, which they have put into this rank's staging of `round`. */
static void get_slices(struct run *run, const struct slices *of, size_t chunk, uint32_t round)
{
    ff_group *group = run->group;
    for (int i = 1; i < group->ranks; i++) {
        int q = (group->rank + i) % group->ranks;
        size_t bytes = slice_bytes(of, group, chunk, q);
        const char *sums = ff_staging(group, group->rank, round) + (size_t)q * of->slice;
        char *out = (char *)run->call->out + slice_at(of, group, chunk, q);
        claim(sums, 0, bytes);
        for (size_t at = 0; at < bytes; at += PIECE_BYTES) {
            claim(sums, at + PIECE_BYTES, bytes);
            memcpy(out + at, sums + at, least(PIECE_BYTES, bytes - at));
        }
    }
}

/* Rank r adds slice r of every chunk. Its staging holds the others' slices of chunk k, which they replace by the
 * sums; one round serves both:
 *
 *     round k    put the others' slices of chunk k; turn; replace own slice of k; get the sums of k - 1
 *
 * `begun`: round 0 has been posted already.
 */
static int reduce_slices(struct run *run, const struct slices *of, bool begun)
{
    ff_group *group = run->group;
    for (size_t k = 0; k <= of->chunks; k++) {
        uint32_t round = begun && k == 0 ? group->round - 1 : group->round;
        if (round == group->round) {
            if (k < of->chunks)
                put_slices(run, of, k);
            int status = ff_turn(run);
            if (status)
                return status;
        }
        if (k < of->chunks)
            replace_slice(run, of, k, round);
        if (k > 0 && wants_result(run))
            get_slices(run, of, k - 1, round - 1);
    }
    return FF_OK;
}

/* Whether the others may reach the tensor of this rank. They write to one in an arena, so it has to hold the
 * result as well. */
static bool offer(struct run *run, size_t bytes)
{
    const ff_call *call = run->call;
    if (call->in == call->out || !wants_result(run) || !ff_place(run->group, call->in, bytes))
        return ff_offer(run, call->in, bytes);
    return false;
}

/* Nobody knows beforehand whether all tensors can be reached. So each rank tells in round 0 where its own is, and
 * one that offers none puts its first chunk as well. If all can be reached, they are added where they lie; if none
 * can, the first chunk has been put; if only some can, all begin anew. */
static int reduce_large(struct run *run, size_t bytes)
{
    ff_group *group = run->group;
    const struct slices of = slices_of(group, bytes, false);
    struct view views[FF_MAX_LOCAL];
    uint32_t round = group->round;
    if (!offer(run, bytes))
        put_slices(run, &of, 0);
    int status = ff_turn(run);
    if (status)
        return status;
    int seen = ff_look(run, round, views);
    if (seen == group->ranks)
        return ff_sum_in_place(run, bytes, views);
    return reduce_slices(run, &of, !seen);
}

int ff_run_all_reduce(struct run *run)
{
    size_t bytes = run->call->count * run->size;
    if (!exists(run))
        return cannot_reduce(run);
    if (bytes <= INLINED)
        return reduce_inlined(run, bytes);
    size_t others = (size_t)(run->group->ranks > 1 ? run->group->ranks - 1 : 1);
    return bytes * others <= least(WHOLE_BYTES, run->group->staging_bytes) ? reduce_whole(run, bytes)
                                                                          : reduce_large(run, bytes);
}

/* As with reduce_large, the first round tells who can be reached. */
int ff_run_reduce_scatter(struct run *run)
{
    ff_group *group = run->group;
    const struct slices of = slices_of(group, run->call->count * run->size, true);
    struct view views[FF_MAX_LOCAL];
    if (!exists(run))
        return cannot_reduce(run);
    if (!of.chunks)
        return ff_turn(run);
    uint32_t round = group->round;
    if (run->call->ins || !ff_offer(run, run->call->in, of.total * (size_t)group->ranks))
        put_slices(run, &of, 0);
    int status = ff_turn(run);
    int seen = status ? 0 : ff_look(run, round, views);
    if (seen == group->ranks)
        return ff_sum_blocks(run, of.total, views);
    for (size_t k = 0; k < of.chunks && !status; k++) {
        if (k > 0 || seen) {
            round = group->round;
            put_slices(run, &of, k);
            status = ff_turn(run);
        }
        if (!status)
            add_slice(run, &of, k, round, (char *)run->call->out + slice_at(&of, group, k, group->rank));
    }
    return status;
}

int ff_execute(struct run *run)
{
    static int (*const kinds[FF_KINDS])(struct run *) = {
        [FF_ALLREDUCE] = ff_run_all_reduce,   [FF_REDUCE] = ff_run_all_reduce,
        [FF_BROADCAST] = ff_run_broadcast,    [FF_ALLGATHER] = ff_run_all_gather,
        [FF_GATHER] = ff_run_gather,          [FF_SCATTER] = ff_run_scatter,
        [FF_ALLTOALL] = ff_run_all_to_all,    [FF_ALLTOALLV] = ff_run_all_to_all,
        [FF_BARRIER] = ff_run_barrier,        [FF_REDUCE_SCATTER] = ff_run_reduce_scatter,
    };
    ff_group *group = run->group;
    run->report->kind = run->call->kind;
    run->report->sequence = group->sequence++;
    run->report->started_ns = 0;
    if (ff_is_broken(group, run->report))
        return FF_BROKEN;
    run->size = ff_dtype_bytes(run->call->dtype);
    int status = group->nodes ? ff_execute_on_nodes(run) : kinds[run->call->kind](run);
    run->report->status = (uint32_t)status;
    return status;
}
