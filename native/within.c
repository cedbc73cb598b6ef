/* What collectives over several nodes do within a node: ranks show, give and add what they have, through the memory that
 * they share. All arrays are by rank of the node.
 */
#include "carry.h"

#include <string.h>

/* Each shows the others `bytes[q]`, which go `to[q]`, where that is not NULL. */
int ff_show(struct run *run, const void *own, const size_t *bytes, char *const *to)
{
    ff_group *group = run->group;
    size_t step = group->staging_bytes, most = 0;
    for (int q = 0; q < group->ranks; q++)
        most = bytes[q] > most ? bytes[q] : most;
    for (size_t at = 0; at < most && group->ranks > 1; at += step) {
        uint32_t round = group->round;
        if (bytes[group->rank] > at)
            copy(ff_staging(group, group->rank, round), (const char *)own + at,
                 least(step, bytes[group->rank] - at));
        int status = ff_turn(run);
        if (status)
            return status;
        for (int i = 1; i < group->ranks; i++) {
            int q = (group->rank + i) % group->ranks;
            if (to[q] && bytes[q] > at)
                copy(to[q] + at, ff_staging(group, q, round), least(step, bytes[q] - at));
        }
    }
    return FF_OK;
}

/* All learn what each gives, the most of which is returned in `most`, and whether the others expect that. */
static int agree(struct run *run, const struct blocks *own, size_t *most)
{
    ff_group *group = run->group;
    uint32_t round = group->round;
    uint64_t *told = (uint64_t *)ff_staging(group, group->rank, round);
    for (int q = 0; q < group->ranks; q++) {
        told[q] = own->in_bytes[q];
        told[group->ranks + q] = own->out_bytes[q];
    }
    int status = ff_turn(run);
    *most = 0;
    for (int from = 0; from < group->ranks && !status; from++) {
        const uint64_t *given = (const uint64_t *)ff_staging(group, from, round);
        for (int to = 0; to < group->ranks; to++) {
            const uint64_t *expected = (const uint64_t *)ff_staging(group, to, round) + group->ranks;
            *most = given[to] > *most ? given[to] : *most;
            if (given[to] == expected[from])
                continue;
            run->report->other = ff_world(group, from);
            run->report->other_root = ff_world(group, to);
            run->report->other_kind = run->call->kind;
            run->report->other_count = given[to];
            return FF_MISMATCH;
        }
    }
    return status;
}

int ff_swap(struct run *run, const struct blocks *own)
{
    ff_group *group = run->group;
    size_t step = group->staging_bytes / (size_t)group->ranks / 64 * 64, most;
    int status = agree(run, own, &most);
    if (status)
        return status;
    copy(own->out[group->rank], own->in[group->rank], own->out_bytes[group->rank]);
    for (size_t at = 0; at < most && group->ranks > 1; at += step) {
        uint32_t round = group->round;
        for (int q = 0; q < group->ranks; q++)
            if (q != group->rank && own->in_bytes[q] > at)
                copy(ff_staging(group, group->rank, round) + (size_t)q * step, own->in[q] + at,
                     least(step, own->in_bytes[q] - at));
        if ((status = ff_turn(run)))
            return status;
        for (int q = 0; q < group->ranks; q++)
            if (q != group->rank && own->out_bytes[q] > at)
                copy(own->out[q] + at, ff_staging(group, q, round) + (size_t)group->rank * step,
                     least(step, own->out_bytes[q] - at));
    }
    return FF_OK;
}

/* Rank q of the node adds `spans[q]` of all of them, into `part`. */
int ff_add_spans(struct run *run, const struct span *spans, char *part, size_t part_size, ff_reduce add)
{
    ff_group *group = run->group;
    size_t step = group->staging_bytes / (size_t)group->ranks / 64 * 64 / run->size, most = 0;
    const struct span *mine = &spans[group->rank];
    const void *sources[FF_MAX_LOCAL];
    for (int q = 0; q < group->ranks; q++)
        most = spans[q].count > most ? spans[q].count : most;
    for (size_t at = 0; at < most; at += step) {
        uint32_t round = group->round;
        char *own = ff_staging(group, group->rank, round);
        for (int q = 0; q < group->ranks; q++)
            if (q != group->rank && spans[q].count > at)
                copy(own + (size_t)q * step * run->size, spans[q].at + at * run->size,
                     least(step, spans[q].count - at) * run->size);
        int status = ff_turn(run);
        if (status)
            return status;
        if (mine->count <= at)
            continue;
        for (int q = 0; q < group->ranks; q++)
            sources[q] = q == group->rank ? mine->at + at * run->size
                                          : ff_staging(group, q, round) + (size_t)group->rank * step * run->size;
        add(part + at * part_size, sources, group->ranks, group->ranks, least(step, mine->count - at));
    }
    return FF_OK;
}
