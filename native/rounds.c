/* A round: post, then wait until all ranks have posted. Every collective is a series of rounds. */
#define _GNU_SOURCE
#include "internal.h"

#include <string.h>

/* How often a sleeper looks whether its peers still live. */
static const uint64_t LOOK_NS = 50 * 1000 * 1000;

char *ff_staging(const ff_group *group, int rank, uint32_t round)
{
    return group->staging + (2 * (size_t)rank + (round & 1)) * group->staging_bytes;
}

struct post *ff_posted(const ff_group *group, int rank, uint32_t round)
{
    return &group->posts[2 * rank + (int)(round & 1)];
}

static bool has_come(struct post *post, uint32_t flag)
{
    return atomic_load_explicit(&post->flag, memory_order_acquire) == flag;
}

/* Everybody who has not posted, as the report of this rank. */
static int missing(struct run *run, int status)
{
    ff_group *group = run->group;
    for (int q = 0; q < group->ranks; q++)
        if (!has_come(ff_posted(group, q, group->round), group->round + 1))
            ff_miss(run->report, ff_world(group, q));
    return ff_give_up(group, run->report, status);
}

static int sleep_for(struct run *run, int rank)
{
    ff_group *group = run->group;
    struct post *post = ff_posted(group, rank, group->round);
    uint32_t flag = group->round + 1;
    int status = FF_OK;
    atomic_fetch_add(&post->sleepers, 1);
    for (;;) {
        uint32_t seen = atomic_load(&post->flag);
        if (seen == flag)
            break;
        uint64_t now_ns = ff_now_ns();
        if (ff_is_broken(group, run->report)) {
            status = FF_BROKEN;
        } else if (ff_has_ended(group, rank)) {
            status = has_come(post, flag) ? FF_OK : FF_DIED;
        } else if (atomic_load(&group->bells[rank].left)) {
            status = has_come(post, flag) ? FF_OK : FF_LEFT;
        } else if (now_ns >= run->patience.deadline_ns) {
            status = FF_TIMEOUT;
        } else {
            uint64_t left_ns = run->patience.deadline_ns - now_ns;
            ff_futex_wait(&post->flag, seen, left_ns < LOOK_NS ? left_ns : LOOK_NS);
            continue;
        }
        break;
    }
    atomic_fetch_sub(&post->sleepers, 1);
    if (status == FF_OK || status == FF_BROKEN)
        return status;
    return status == FF_TIMEOUT ? missing(run, status)
                                : (ff_miss(run->report, ff_world(group, rank)), ff_give_up(group, run->report, status));
}

static int wait_for(struct run *run, int rank)
{
    ff_group *group = run->group;
    struct post *post = ff_posted(group, rank, group->round);
    uint32_t flag = group->round + 1;
    struct patience patience = run->patience;
    do {
        if (has_come(post, flag))
            return FF_OK;
    } while (ff_bide(&patience));
    return sleep_for(run, rank);
}

uint32_t ff_what(const ff_call *call)
{
    return call->kind | call->dtype << 8 | call->reduction << 16;
}

/* All ranks see all posts, so if any two differ every rank finds one that differs from its own; and all find the
 * same latest arrival. */
static int check(struct run *run)
{
    ff_group *group = run->group;
    const struct post *own = ff_posted(group, group->rank, group->round);
    uint64_t latest_ns = 0;
    for (int q = 0; q < group->ranks; q++) {
        const struct post *post = ff_posted(group, q, group->round);
        if (post->what == own->what && post->root == own->root && post->count == own->count) {
            latest_ns = post->arrived_ns > latest_ns ? post->arrived_ns : latest_ns;
            continue;
        }
        run->report->status = FF_MISMATCH;
        run->report->other = ff_world(group, q);
        run->report->other_kind = post->what & 0xff;
        run->report->other_dtype = post->what >> 8 & 0xff;
        run->report->other_reduction = post->what >> 16 & 0xff;
        run->report->other_root = post->root;
        run->report->other_count = post->count;
        return FF_MISMATCH;
    }
    run->report->started_ns = latest_ns;
    return FF_OK;
}

/* Post this rank's round and wait for the others'. Their staging may then be read, until the next turn. */
int ff_turn(struct run *run)
{
    ff_group *group = run->group;
    struct post *own = ff_posted(group, group->rank, group->round);
    own->what = ff_what(run->call);
    own->root = run->call->root;
    own->count = run->call->count;
    own->place = run->place;
    own->address = run->address;
    own->arrived_ns = run->arrived_ns;
    atomic_store(&own->flag, group->round + 1);
    if (atomic_load(&own->sleepers))
        ff_futex_wake(&own->flag);
    for (int i = 1; i < group->ranks; i++) {
        int status = wait_for(run, (group->rank + i) % group->ranks);
        if (status)
            return status;
    }
    int status = run->checked ? FF_OK : check(run);
    run->checked = true;
    group->round++;
    return status;
}
