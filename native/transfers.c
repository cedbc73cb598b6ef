/* Collectives that only move bytes. */
#include "internal.h"

#include <string.h>

int ff_run_barrier(struct run *run)
{
    return ff_turn(run);
}

/* The others post as soon as they have read what came before, so the root fills a staging while they read
 * the other one. Or it offers the tensor as a whole. */
int ff_run_broadcast(struct run *run)
{
    ff_group *group = run->group;
    size_t total = block_bytes(run), step = group->staging_bytes, at = 0;
    bool root = group->rank == run->call->root;
    bool offered = root && ff_offer(run, run->call->in, total);
    struct view views[FF_MAX_LOCAL];
    int seen = 0;
    do {
        uint32_t round = group->round;
        size_t bytes = least(step, total - at);
        if (root && !offered)
            copy(ff_staging(group, group->rank, round), (const char *)run->call->in + at, bytes);
        int status = ff_turn(run);
        if (status)
            return status;
        if (at == 0 && (seen = ff_look(run, round, views)))
            bytes = total;
        if (!root)
            status = ff_fetch(run, &views[run->call->root], at, ff_staging(group, run->call->root, round),
                              (char *)run->call->out + at, bytes);
        if (status)
            return status;
        at += bytes;
    } while (at < total);
    return seen ? ff_part(run) : FF_OK;
}

/* Gather, at `root`, or everywhere. Those that offer nothing stage piece by piece. */
static int gather(struct run *run, bool here)
{
    ff_group *group = run->group;
    size_t total = block_bytes(run), step = group->staging_bytes, at = 0;
    bool offered = ff_offer(run, run->call->in, total);
    struct view views[FF_MAX_LOCAL];
    int seen = 0;
    if (here)
        copy(block_out(run, group->rank), run->call->in, total);
    do {
        uint32_t round = group->round;
        size_t bytes = least(step, total - at);
        if (!offered)
            copy(ff_staging(group, group->rank, round), (const char *)run->call->in + at, bytes);
        int status = ff_turn(run);
        if (status)
            return status;
        if (at == 0 && (seen = ff_look(run, round, views)) == group->ranks)
            bytes = total;
        for (int i = 1; here && i < group->ranks; i++) {
            int q = (group->rank + i) % group->ranks;
            if ((status = ff_fetch(run, &views[q], at, ff_staging(group, q, round), block_out(run, q) + at,
                                   bytes)))
                return status;
        }
        at += bytes;
    } while (at < total);
    return seen ? ff_part(run) : FF_OK;
}

int ff_run_all_gather(struct run *run)
{
    return gather(run, true);
}

int ff_run_gather(struct run *run)
{
    return gather(run, run->group->rank == run->call->root);
}

/* Staging holds a piece for every rank. */
static size_t room(const ff_group *group)
{
    return group->staging_bytes / (size_t)group->ranks / 64 * 64;
}

int ff_run_scatter(struct run *run)
{
    ff_group *group = run->group;
    size_t total = block_bytes(run), step = room(group), at = 0;
    bool root = group->rank == run->call->root;
    bool offered = root && !run->call->ins && ff_offer(run, run->call->in, total * (size_t)group->ranks);
    struct view views[FF_MAX_LOCAL];
    int seen = 0;
    if (root)
        copy(run->call->out, block_in(run, group->rank), total);
    do {
        uint32_t round = group->round;
        size_t bytes = least(step, total - at);
        char *own = ff_staging(group, group->rank, round);
        for (int q = 0; root && !offered && q < group->ranks; q++)
            if (q != group->rank)
                copy(own + (size_t)q * step, block_in(run, q) + at, bytes);
        int status = ff_turn(run);
        if (status)
            return status;
        if (at == 0 && (seen = ff_look(run, round, views)))
            bytes = total;
        const char *staged = ff_staging(group, run->call->root, round) + (size_t)group->rank * step;
        if (!root)
            status = ff_fetch(run, &views[run->call->root], (size_t)group->rank * total + at, staged,
                              (char *)run->call->out + at, bytes);
        if (status)
            return status;
        at += bytes;
    } while (at < total);
    return seen ? ff_part(run) : FF_OK;
}

/* What goes from every rank to every other, in bytes, and where it lies here. */
struct exchange {
    size_t in_bytes[FF_MAX_LOCAL], out_bytes[FF_MAX_LOCAL];
    const char *in[FF_MAX_LOCAL];
    char *out[FF_MAX_LOCAL];
    size_t most;            /* of all blocks of all ranks */
    size_t in_total;
    size_t from[FF_MAX_LOCAL];      /* where the block for this rank lies in the tensor of another */
    struct view views[FF_MAX_LOCAL];
    int seen;               /* how many ranks offer their tensor; -1: not known yet */
};

static void lay_out(const struct run *run, struct exchange *of)
{
    const ff_call *call = run->call;
    const char *in = call->in;
    char *out = call->out;
    bool equal = call->kind == FF_ALLTOALL;
    for (int q = 0; q < run->group->ranks; q++) {
        of->in_bytes[q] = (equal ? call->count : call->in_counts[q]) * run->size;
        of->out_bytes[q] = (equal ? call->count : call->out_counts[q]) * run->size;
        of->in[q] = call->ins ? call->ins[q] : in;
        of->out[q] = call->outs ? call->outs[q] : out;
        of->from[q] = (size_t)run->group->rank * of->in_bytes[q];
        of->in_total += of->in_bytes[q];
        in += call->ins ? 0 : of->in_bytes[q];
        out += call->outs ? 0 : of->out_bytes[q];
    }
    of->most = block_bytes(run);
}

/* All ranks see the sizes that all ranks expect, and so either all go on or none does. */
static int agree(struct run *run, struct exchange *of)
{
    ff_group *group = run->group;
    uint32_t round = group->round;
    uint64_t *own = (uint64_t *)ff_staging(group, group->rank, round);
    for (int q = 0; q < group->ranks; q++) {
        own[q] = of->in_bytes[q];
        own[group->ranks + q] = of->out_bytes[q];
    }
    int status = ff_turn(run);
    if (status)
        return status;
    of->seen = ff_look(run, round, of->views);
    of->most = 0;
    for (int from = 0; from < group->ranks; from++) {
        const uint64_t *sent = (const uint64_t *)ff_staging(group, from, round);
        of->from[from] = 0;
        for (int to = 0; to < group->rank; to++)
            of->from[from] += sent[to];
        for (int to = 0; to < group->ranks; to++) {
            const uint64_t *expected = (const uint64_t *)ff_staging(group, to, round) + group->ranks;
            if (sent[to] > of->most)
                of->most = sent[to];
            if (sent[to] == expected[from])
                continue;
            run->report->other = from;
            run->report->other_root = to;
            run->report->other_kind = FF_ALLTOALLV;
            run->report->other_count = sent[to];
            return FF_MISMATCH;
        }
    }
    return FF_OK;
}

static void put_blocks(struct run *run, const struct exchange *of, size_t at)
{
    ff_group *group = run->group;
    size_t step = room(group);
    char *own = ff_staging(group, group->rank, group->round);
    for (int i = 1; i < group->ranks; i++) {
        int q = (group->rank + i) % group->ranks;
        size_t bytes = of->in_bytes[q] > at ? least(step, of->in_bytes[q] - at) : 0;
        copy(own + (size_t)q * step, of->in[q] + at, bytes);
    }
}

static int get_blocks(struct run *run, const struct exchange *of, size_t at, size_t most, uint32_t round)
{
    ff_group *group = run->group;
    size_t place = (size_t)group->rank * room(group);
    int status = FF_OK;
    for (int i = 1; i < group->ranks && !status; i++) {
        int q = (group->rank + i) % group->ranks;
        size_t bytes = of->out_bytes[q] > at ? least(most, of->out_bytes[q] - at) : 0;
        status = ff_fetch(run, &of->views[q], of->from[q] + at, ff_staging(group, q, round) + place,
                          of->out[q] + at, bytes);
    }
    return status;
}

int ff_run_all_to_all(struct run *run)
{
    ff_group *group = run->group;
    size_t at = 0, step = room(group);
    struct exchange of;
    of.seen = -1;
    of.in_total = 0;
    lay_out(run, &of);
    bool offered = !run->call->ins && ff_offer(run, run->call->in, of.in_total);
    int status = run->call->kind == FF_ALLTOALLV ? agree(run, &of) : FF_OK;
    if (status)
        return status;
    copy(of.out[group->rank], of.in[group->rank], of.in_bytes[group->rank]);
    do {
        uint32_t round = group->round;
        if (of.seen < group->ranks) {
            if (!offered)
                put_blocks(run, &of, at);
            if ((status = ff_turn(run)))
                return status;
        }
        if (of.seen < 0)
            of.seen = ff_look(run, round, of.views);
        step = of.seen == group->ranks ? of.most : step;
        if ((status = get_blocks(run, &of, at, step, round)))
            return status;
        at += step;
    } while (at < of.most);
    return of.seen ? ff_part(run) : FF_OK;
}
