/* Reaching a tensor of another rank where it lies, so that it need not be staged:
 *
 *     in its arena          mapped here: read and written like own memory
 *     anywhere else         copied by the kernel (process_vm_readv), where it lets all ranks do so to each other
 *
 * What a rank offers is told in a post; all read it in that round, and one more round says that all have.
 * Other processes are only ever read: were a process id given to a stranger, a write would destroy its memory,
 * while what was read is thrown away with the round that the dead rank never posts.
 */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

/* Below, a second round costs more than the copy that it saves. */
static const size_t MAPPED_BYTES = 64 * 1024;
/* For which sizes of the tensor the kernel's one copy beats our own two, which work on cached data and on two
 * cores at once: where 2 ranks on 2 cores were faster with it, both ways in turn. Sums of all ranks never were;
 * reduce, gather and scatter were not tried. */
#ifndef FF_READ_ALL
static const struct range {
    size_t least, most;
} READ_BYTES[FF_KINDS] = {
    [FF_BROADCAST] = {64 << 10, 512 << 10},     /* staged, larger ones flow on both cores */
    [FF_ALLGATHER] = {64 << 10, SIZE_MAX},
    [FF_REDUCE_SCATTER] = {256 << 10, 8 << 20},
    [FF_ALLTOALL] = {256 << 10, 8 << 20},
    [FF_ALLTOALLV] = {256 << 10, 8 << 20},
};
/* With more ranks than cores a further round is dear. */
static const size_t CROWDED_BYTES = 1 << 20;
#endif

/* Whether to have a tensor outside the arenas read by the others. */
static bool worth_reading(const struct run *run, size_t bytes)
{
#ifdef FF_READ_ALL      /* for tests */
    return run->call->kind != FF_REDUCE && run->call->kind != FF_ALLREDUCE && bytes >= FF_READ_ALL;
#else
    struct range range = READ_BYTES[run->call->kind];
    size_t least = run->group->crowded && range.least < CROWDED_BYTES ? CROWDED_BYTES : range.least;
    return range.most && bytes >= least && bytes <= range.most;
#endif
}

/* Where a tensor lies in the arena of this rank, + 1; 0 if it does not. */
uint64_t ff_place(const ff_group *group, const void *data, size_t bytes)
{
    const struct peer *own = &group->peers[group->rank];
    const char *begin = data;
    bool inside = own->arena && begin >= own->arena && begin + bytes <= own->arena + own->arena_bytes;
    return inside ? (uint64_t)(begin - own->arena) + 1 : 0;
}

/* Tell the others in the next post where a tensor lies, if that pays; else it has to be staged. */
bool ff_offer(struct run *run, const void *data, size_t bytes)
{
    ff_group *group = run->group;
    run->offered = data;
    run->place = bytes >= MAPPED_BYTES ? ff_place(group, data, bytes) : 0;
    bool readable = !run->place && group->reaches && worth_reading(run, bytes);
    run->address = readable ? (uint64_t)(uintptr_t)data : 0;
    return run->place || run->address;
}

struct view ff_view(const ff_group *group, int rank, uint64_t place, uint64_t address)
{
    const struct peer *peer = &group->peers[rank];
    if (!place)
        return (struct view){.rank = rank, .address = address};
    if (!peer->arena || place > peer->arena_bytes)
        return (struct view){.rank = rank, .address = UINT64_MAX};     /* nothing can be read there */
    return (struct view){.rank = rank, .mapped = peer->arena + place - 1,
                         .room = peer->arena_bytes - (place - 1)};
}

bool ff_sees(const struct view *view)
{
    return view->mapped || view->address;
}

/* What the ranks offered in `round`, which is over; how many did. */
int ff_look(struct run *run, uint32_t round, struct view *views)
{
    ff_group *group = run->group;
    int seen = 0;
    for (int q = 0; q < group->ranks; q++) {
        const struct post *post = ff_posted(group, q, round);
        views[q] = ff_view(group, q, post->place, post->address);
        seen += ff_sees(&views[q]);
    }
    if (ff_sees(&views[group->rank]))
        views[group->rank] = (struct view){.rank = group->rank, .mapped = (char *)run->offered, .room = SIZE_MAX};
    run->place = run->address = 0;
    return seen;
}

/* Copy out of what another rank offers; 0 or an errno. */
int ff_read_from(const ff_group *group, const struct view *view, size_t at, void *to, size_t bytes)
{
    if (view->mapped) {
        if (at > view->room || bytes > view->room - at)
            return EFAULT;
        memcpy(to, view->mapped + at, bytes);
        return 0;
    }
    for (size_t done = 0; done < bytes;) {
        struct iovec here = {(char *)to + done, bytes - done};
        struct iovec there = {(void *)(uintptr_t)(view->address + at + done), bytes - done};
        ssize_t got = process_vm_readv(group->peers[view->rank].pid, &here, 1, &there, 1, 0);
        if (got == 0 || (got < 0 && errno != EINTR))
            return got ? errno : EFAULT;
        done += got > 0 ? (size_t)got : 0;
    }
    return 0;
}

/* Copy `bytes` at `at` of what rank `view->rank` offers, or, if it offers nothing, what it has staged. */
int ff_fetch(struct run *run, const struct view *view, size_t at, const void *staged, void *to, size_t bytes)
{
    if (!ff_sees(view) && bytes)
        memcpy(to, staged, bytes);
    if (!ff_sees(view) || !bytes || !ff_read_from(run->group, view, at, to, bytes))
        return FF_OK;
    return ff_unreadable(run, view->rank);
}

/* Give up because what a rank offers cannot be read. */
int ff_unreadable(struct run *run, int rank)
{
    if (ff_is_broken(run->group, run->report))
        return FF_BROKEN;       /* its owner gave up, and may have let the tensor go */
    ff_miss(run->report, ff_world(run->group, rank));
    return ff_give_up(run->group, run->report, ff_is_ending(run->group, rank) ? FF_DIED : FF_UNREADABLE);
}

/* The round after tensors were read where they lie: only now may their owners change them. One that gave up before
 * may have done so already, and what was read from it is worth nothing. */
int ff_part(struct run *run)
{
    int status = ff_turn(run);
    return status || !ff_is_broken(run->group, run->report) ? status : FF_BROKEN;
}

/* What a rank tells the others so that they can try to read it. */
struct trial {
    uint64_t pid, address, token;
    uint64_t failed, about;     /* an errno, and of which rank the memory was */
};

/* Read the token of every rank; note the first that fails. */
static void try_all(ff_group *group, uint32_t round, struct trial *verdict)
{
    for (int q = 0; q < group->ranks; q++) {
        const struct trial *other = (const struct trial *)ff_staging(group, q, round);
        struct view view = {.rank = q, .address = other->address};
        uint64_t token = 0;
        group->peers[q].pid = (int)other->pid;
        int problem = ff_read_from(group, &view, 0, &token, sizeof token);
        if (!problem && token != other->token)
            problem = ESRCH;
        if (problem && !verdict->failed)
            *verdict = (struct trial){.failed = (uint64_t)problem, .about = (uint64_t)q};
    }
}

int ff_group_probe(ff_group *group, double timeout_s, ff_report *report)
{
    const ff_call call = {.kind = FF_BARRIER, .timeout_s = timeout_s};
    struct run run = {.group = group, .call = &call, .report = report,
                      .patience = ff_patience(group, ff_deadline_ns(timeout_s), false)};
    struct trial verdict = {0};
    group->token = ff_now_ns() << 8 | (uint64_t)group->rank;
    uint32_t round = group->round;
    *(struct trial *)ff_staging(group, group->rank, round) = (struct trial){
        .pid = (uint64_t)getpid(), .address = (uint64_t)(uintptr_t)&group->token, .token = group->token};
    int status = ff_turn(&run);
    if (status)
        return status;
    try_all(group, round, &verdict);
    round = group->round;
    *(struct trial *)ff_staging(group, group->rank, round) = verdict;
    if ((status = ff_turn(&run)))
        return status;
    for (int q = 0; q < group->ranks; q++) {
        const struct trial *other = (const struct trial *)ff_staging(group, q, round);
        if (!other->failed)
            continue;
        report->other = ff_world(group, q);
        report->other_root = ff_world(group, (int)other->about);
        report->other_count = other->failed;
        return FF_OK;
    }
    group->reaches = true;
    return FF_OK;
}
