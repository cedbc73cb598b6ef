/* Sums of tensors that all ranks can reach where they lie (reach.c). */
#include "internal.h"

#include <string.h>

/* What is added at a time, so that it is still cached when it is copied. */
static const size_t PIECE_BYTES = 16 * 1024;

/* What fits into a core's first cache beside what is added to it. */
enum { PARTIAL_BYTES = 4096 };

/* ((0 + 1) + 2) + 3, rounded after each, as one process adds what comes one after the other. */
static void add_in_order(const struct run *run, char *out, const void *const *sources, size_t count)
{
    const int n = run->group->ranks;
    uint32_t dtype = run->call->dtype, what = run->call->reduction;
    ff_reduce next = ff_reduction_of(dtype, what == FF_AVG ? FF_SUM : what), last = ff_reduction_of(dtype, what);
    _Alignas(64) char partial[PARTIAL_BYTES];
    size_t bytes = count * run->size;
    for (size_t at = 0; at < bytes; at += sizeof partial) {
        size_t piece = least(sizeof partial, bytes - at) / run->size;
        const void *pair[2] = {(const char *)sources[0] + at, (const char *)sources[1] + at};
        for (int q = 2; q < n; q++) {
            next(partial, pair, 2, n, piece);
            pair[0] = partial;
            pair[1] = (const char *)sources[q] + at;
        }
        last(out + at, pair, 2, n, piece);
    }
}

void ff_add(const struct run *run, void *out, const void *const *sources, size_t count)
{
    const int n = run->group->ranks;
    if (run->group->in_order && n > 2)
        add_in_order(run, out, sources, count);
    else
        ff_reduction_of(run->call->dtype, run->call->reduction)(out, sources, n, n, count);
}

/* Rank r adds slice r: from begin[r] to begin[r + 1]. */
static size_t slice_begin(const struct run *run, size_t bytes, int rank)
{
    size_t ranks = (size_t)run->group->ranks, slice = (bytes + ranks * 64 - 1) / (ranks * 64) * 64;
    return least((size_t)rank * slice, bytes);
}

/* FF_OK if so many bytes can be reached of every tensor that is mapped, as `all` have to be. */
static int within(struct run *run, const struct view *views, size_t bytes, bool all)
{
    for (int q = 0; q < run->group->ranks; q++)
        if (views[q].room < bytes && (all || views[q].mapped))
            return ff_unreadable(run, q);
    return FF_OK;
}

/* All tensors are mapped: rank r adds slice r where it lies and writes the sum to all of them, or to the root's. */
int ff_sum_in_place(struct run *run, size_t bytes, const struct view *views)
{
    ff_group *group = run->group;
    bool all = run->call->kind == FF_ALLREDUCE;
    int first = all ? group->rank : run->call->root;
    size_t end = slice_begin(run, bytes, group->rank + 1);
    const void *sources[FF_MAX_LOCAL];
    int status = within(run, views, bytes, true);
    if (status)
        return status;
    for (size_t at = slice_begin(run, bytes, group->rank); at < end; at += PIECE_BYTES) {
        size_t piece = least(PIECE_BYTES, end - at);
        char *sum = views[first].mapped + at;
        for (int q = 0; q < group->ranks; q++)
            sources[q] = views[q].mapped + at;
        ff_add(run, sum, sources, piece / run->size);
        for (int q = 0; all && q < group->ranks; q++)
            if (q != group->rank)
                memcpy(views[q].mapped + at, sum, piece);
    }
    return ff_part(run);
}

/* Add `bytes` that lie at `at` of every tensor into `out`. What is not mapped comes through the staging of this
 * rank, which nobody reads meanwhile. */
static int add(struct run *run, const struct view *views, size_t at, size_t bytes, char *out)
{
    ff_group *group = run->group;
    size_t room = group->staging_bytes / (size_t)group->ranks / 64 * 64;
    char *staging = ff_staging(group, group->rank, group->round);
    const void *sources[FF_MAX_LOCAL];
    for (size_t done = 0; done < bytes; done += room) {
        size_t piece = least(room, bytes - done);
        for (int q = 0; q < group->ranks; q++) {
            char *copy = staging + (size_t)q * room;
            sources[q] = views[q].mapped ? views[q].mapped + at + done : copy;
            int status = views[q].mapped ? FF_OK : ff_fetch(run, &views[q], at + done, NULL, copy, piece);
            if (status)
                return status;
        }
        ff_add(run, out + done, sources, piece / run->size);
    }
    return FF_OK;
}

/* Reduce-scatter: rank r adds block r, which has so many bytes. */
int ff_sum_blocks(struct run *run, size_t bytes, const struct view *views)
{
    int status = within(run, views, (size_t)run->group->ranks * bytes, false);
    if (!status)
        status = add(run, views, (size_t)run->group->rank * bytes, bytes, run->call->out);
    return status ? status : ff_part(run);
}
