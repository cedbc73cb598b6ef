/* Small sums, gathers and barriers of many nodes, in as many rounds as their number has doublings.
 *
 *     node 0 ─┐ 0+1 ─┐ (0+1)+(2+3) ─┐              each exchanges what it has with one of the block beside its own, and
 *     node 1 ─┘ 0+1  │              │              then both blocks are one, all of which have the same: the branches of
 *     node 2 ─┐ 2+3 ─┘              │ ... + 4      the tree in which sums are made (decision 25)
 *     node 3 ─┘ 2+3                 │
 *     node 4                        ┘              a block with fewer nodes sends to several
 */
#include "carry.h"

/* Who waits in a later round names someone who waits too, unless those that wait for the culprit have spoken before. */
static void wait_for_earlier(struct run *run)
{
    if (run->patience.deadline_ns != UINT64_MAX)
        run->patience.deadline_ns += FF_ROUND_GRACE_NS;
}

static int leader(const struct nodes *nodes, int node)
{
    return nodes->members[nodes->begins[node]];
}

uint64_t ff_rounds_grace_ns(const struct nodes *nodes)
{
    uint64_t ns = 0;
    for (int width = 1; width < nodes->count; width *= 2)
        ns += FF_ROUND_GRACE_NS;
    return ns;
}

int ff_double_up(struct run *run, const struct doubled *of)
{
    struct nodes *nodes = run->group->nodes;
    int node = nodes->node, count = nodes->count;
    size_t bytes = of->count * of->size;
    for (int width = 1; width < count; width *= 2, wait_for_earlier(run)) {
        int begin = node / width * width, beside = (node / width ^ 1) * width;
        if (beside >= count)
            continue;
        int here = (int)least((size_t)width, (size_t)(count - begin));
        int there = (int)least((size_t)width, (size_t)(count - beside));
        struct list list = ff_pieces(run);
        ff_receive_piece(&list, leader(nodes, beside + (node - begin) % there), of->room, bytes);
        for (int to = node - begin; to < there; to += here)
            ff_send_piece(&list, leader(nodes, beside + to), of->own, bytes);
        int status = ff_carry(&list);
        if (status)
            return status;
        bool over = 2 * width >= count, first = begin < beside;
        const void *sources[] = {first ? of->own : of->room, first ? of->room : of->own};
        (over ? of->last : of->pair)(over ? of->out : of->own, sources, 2, nodes->ranks, of->count);
    }
    return FF_OK;
}

/* `all` has this node's block, and becomes those of all nodes: of this one, the one after it, and so on; each begins at
 * `begins`. Each node takes from others as many as it has, of those that come after its own. */
int ff_gather_doubling(struct run *run, char *all, const size_t *begins)
{
    const struct nodes *nodes = run->group->nodes;
    int node = nodes->node, count = nodes->count, status = FF_OK;
    for (int width = 1; width < count && !status; width *= 2, wait_for_earlier(run)) {
        int taken = (int)least((size_t)width, (size_t)(count - width));
        struct list list = ff_pieces(run);
        ff_send_piece(&list, leader(nodes, (node - width + count) % count), all, begins[taken]);
        ff_receive_piece(&list, leader(nodes, (node + width) % count), all + begins[width],
                         begins[width + taken] - begins[width]);
        status = ff_carry(&list);
    }
    return status;
}

/* All have heard of all when each has heard of the nodes 1, 2, 4 ... before it, which had heard of others. */
int ff_meet_leaders(struct run *run)
{
    const struct nodes *nodes = run->group->nodes;
    int node = nodes->node, count = nodes->count, status = FF_OK;
    for (int step = 1; step < count && !status; step *= 2, wait_for_earlier(run)) {
        struct list list = ff_pieces(run);
        ff_send_piece(&list, leader(nodes, (node + step) % count), NULL, 0);
        ff_receive_piece(&list, leader(nodes, (node - step + count) % count), NULL, 0);
        status = ff_carry(&list);
    }
    return status;
}
