/* A group: its memory and its peers. */
#define _GNU_SOURCE
#include "internal.h"

#include <stdlib.h>
#include <string.h>

enum { PAGE = 4096 };

uint32_t ff_abi(void)
{
    return FF_ABI;
}

static size_t up_to(size_t bytes, size_t unit)
{
    return (bytes + unit - 1) / unit * unit;
}

/* Where the parts of a group's memory begin. */
struct layout {
    size_t posts, bells, rings, staging, ring_data, end;
};

static struct layout layout_of(int ranks, size_t staging, size_t ring)
{
    size_t n = (size_t)ranks;
    struct layout at;
    at.posts = up_to(sizeof(struct shared), PAGE);
    at.bells = at.posts + 2 * n * sizeof(struct post);
    at.rings = at.bells + n * sizeof(struct bell);
    at.staging = up_to(at.rings + n * n * sizeof(struct ring), PAGE);
    at.ring_data = at.staging + 2 * n * staging;
    at.end = at.ring_data + n * n * ring;
    return at;
}

size_t ff_group_bytes(int ranks, size_t staging, size_t ring)
{
    return layout_of(ranks, staging, ring).end;
}

int ff_group_set_up(void *memory, int ranks, size_t staging, size_t ring)
{
    struct shared *shared = memory;
    if (ranks < 1 || ranks > FF_MAX_LOCAL || staging % PAGE || ring % PAGE || !staging || !ring)
        return -1;
    shared->ranks = (uint32_t)ranks;
    shared->staging_bytes = staging;
    shared->ring_bytes = ring;
    shared->abi = FF_ABI;
    shared->magic = MAGIC;
    return 0;
}

ff_group *ff_group_open(void *memory, int rank, int crowded)
{
    struct shared *shared = memory;
    if (shared->magic != MAGIC || shared->abi != FF_ABI || rank < 0 || rank >= (int)shared->ranks)
        return NULL;
    ff_group *group = calloc(1, sizeof *group);
    if (!group)
        return NULL;
    struct layout at = layout_of((int)shared->ranks, shared->staging_bytes, shared->ring_bytes);
    char *base = memory;
    group->shared = shared;
    group->posts = (struct post *)(base + at.posts);
    group->bells = (struct bell *)(base + at.bells);
    group->rings = (struct ring *)(base + at.rings);
    group->staging = base + at.staging;
    group->ring_data = base + at.ring_data;
    group->staging_bytes = shared->staging_bytes;
    group->ring_bytes = shared->ring_bytes;
    group->rank = rank;
    group->ranks = (int)shared->ranks;
    group->crowded = crowded != 0;
    for (int q = 0; q < group->ranks; q++)
        group->peers[q].pidfd = -1;
    if (ff_queue_open(group) || ff_messages_open(group)) {
        free(group);
        return NULL;
    }
    return group;
}

void ff_group_peer(ff_group *group, int rank, int pidfd, void *arena, size_t arena_bytes)
{
    group->peers[rank] = (struct peer){.pidfd = pidfd, .waker = -1, .arena = arena, .arena_bytes = arena_bytes};
}

void ff_group_in_order(ff_group *group)
{
    group->in_order = true;
}

void ff_group_close(ff_group *group)
{
    ff_queue_close(group);
    ff_messages_close(group);
    if (group->nodes)
        ff_streams_close(group);
    atomic_store(&group->bells[group->rank].left, 1);
    for (int parity = 0; parity < 2; parity++)      /* who sleeps looks again, and sees that we left */
        ff_futex_wake(&group->posts[2 * group->rank + parity].flag);
    free(group);
}

void ff_group_break(ff_group *group)
{
    ff_report nobody = {0};
    ff_give_up(group, &nobody, FF_CLOSED);
}
