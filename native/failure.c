/* How a group comes to an end: who has ended, who gave up, and how the others learn of it. */
#define _GNU_SOURCE
#include "internal.h"

#include <poll.h>

enum { ENDING_MS = 3000 };

bool ff_has_ended(const ff_group *group, int rank)
{
    struct pollfd end = {.fd = group->peers[rank].pidfd, .events = POLLIN};
    return end.fd >= 0 && poll(&end, 1, 0) == 1;
}

/* Whether a rank whose memory cannot be read has ended: its memory goes first, the rest of it soon after. */
bool ff_is_ending(const ff_group *group, int rank)
{
    struct pollfd end = {.fd = group->peers[rank].pidfd, .events = POLLIN};
    return end.fd >= 0 && poll(&end, 1, ENDING_MS) == 1;
}

void ff_miss(ff_report *report, int rank)
{
    uint32_t named = report->missing_count < FF_MISSING ? report->missing_count : FF_MISSING;
    for (uint32_t i = 0; i < named; i++)
        if (report->missing[i] == rank)
            return;
    if (named < FF_MISSING)
        report->missing[named] = rank;
    report->missing_count++;
}

/* Whoever waits on this node looks again, and sees that the group is broken. */
void ff_break(ff_group *group, uint64_t told)
{
    uint64_t none = 0;
    atomic_compare_exchange_strong(&group->shared->broken, &none, told);
    for (int i = 0; i < 2 * group->ranks; i++)
        ff_futex_wake(&group->posts[i].flag);
    for (int q = 0; q < group->ranks; q++)
        ff_ring_bell(group, q);
    ff_streams_tell_of(group);
}

/* `broken` is status | who gave up << 8 | whom it missed + 1 << 24. The first to give up is remembered;
 * without it the others would wait for a rank that no longer takes part. */
int ff_give_up(ff_group *group, ff_report *report, int status)
{
    uint64_t about = (uint64_t)(report->missing_count ? report->missing[0] + 1 : 0);
    uint64_t told = (uint64_t)status | (uint64_t)ff_own(group) << 8 | about << 24;
    ff_break(group, told);
    report->status = (uint32_t)status;
    return status;
}

bool ff_is_broken(ff_group *group, ff_report *report)
{
    uint64_t told = atomic_load_explicit(&group->shared->broken, memory_order_acquire);
    if (!told)
        return false;
    ff_streams_tell_of(group);  /* every rank tells those that it has streams with */
    report->status = FF_BROKEN;
    report->other_status = (uint32_t)(told & 0xff);
    report->other = (int32_t)(told >> 8 & 0xffff);
    if (told >> 24)
        ff_miss(report, (int)(told >> 24 & 0xffffff) - 1);
    return true;
}
