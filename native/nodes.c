/* Collectives over several nodes.
 *
 *     node 0   rank 0 ┐ memory ┌ rank 1          every rank leads a slice: it adds what its node has of it,
 *                │             │                 exchanges the sum with its counterparts, and the others of
 *              stream        stream              its node read the result
 *                │             │
 *     node 1   rank 2 ┘ memory └ rank 3
 *
 * What is not summed goes from each rank straight to those that it is for, or to one of each node, which shows it
 * the others. Sums are those of nodes, each in the order of a tree over its ranks, in the order of a tree over nodes:
 * the same bits whatever the size, and, where each node has a branch of the tree, wherever the ranks are.
 */
#include "carry.h"

#include <stdlib.h>
#include <string.h>

/* Up to here one rank of each node exchanges all of it: a stream's latency is that of many bytes. */
static const size_t SMALL_BYTES = 16 * 1024;
/* What all gather of no more may go by doubling. */
static const size_t GATHERED_BYTES = 64 * 1024;
/* From here on nodes pass a broadcast on in a chain. */
static const size_t CHAIN_BYTES = 64 * 1024;
/* So much of a slice is exchanged while the next of it is added. */
#ifdef FF_READ_ALL
static const size_t STRETCH_BYTES = 16 * 1024;      /* for tests */
#else
static const size_t STRETCH_BYTES = 1 << 20;
#endif
static const size_t UNIT = 16;     /* elements that slices are multiples of */

static int members(const struct nodes *nodes, int node)
{
    return nodes->begins[node + 1] - nodes->begins[node];
}

/* Rank `place` of a node, counted round and round. */
static int member(const struct nodes *nodes, int node, int place)
{
    return nodes->members[nodes->begins[node] + place % members(nodes, node)];
}

/* Ranks that wait for what one of their node receives from another give it time to say who is missing there. */
static void wait_longer(struct run *run)
{
    if (run->patience.deadline_ns != UINT64_MAX)
        run->patience.deadline_ns += 2 * FF_GRACE_NS + ff_rounds_grace_ns(run->group->nodes);
}

/* ---- sums */

/* How the parts of nodes travel: 16-bit floats as float, unless no node has anything to add, or each rounds its own. */
struct parts {
    size_t size;
    ff_reduce add;          /* of all nodes */
    ff_reduce some;         /* of the ranks of one */
    bool as_they_are;
};

static struct parts parts_of(const struct run *run)
{
    const struct nodes *nodes = run->group->nodes;
    uint32_t dtype = run->call->dtype, reduction = run->call->reduction;
    bool half = dtype == FF_F16 || dtype == FF_BF16;
    if (half && nodes->rounds)
        return (struct parts){run->size, ff_reduction_of(dtype, reduction),
                              ff_reduction_of(dtype, reduction == FF_AVG ? FF_SUM : reduction), true};
    ff_reduce some = ff_reduction_of_some(dtype, reduction);
    if (nodes->ranks == nodes->count || !half)
        return (struct parts){run->size, ff_reduction_of(dtype, reduction), some, true};
    return (struct parts){sizeof(float), ff_reduction_of_parts(dtype, reduction), some, false};
}

/* The part of a node's only rank. */
static const char *alone(const struct parts *parts, const char *in, char *room, size_t count)
{
    const void *sources[] = {in};
    if (parts->as_they_are)
        return in;
    parts->some(room, sources, 1, 1, count);
    return room;
}

static struct sum sum_of(const struct list *list, const struct parts *parts, const char *part, size_t count, char *out)
{
    const struct run *run = list->run;
    const struct nodes *nodes = run->group->nodes;
    size_t bytes = count * parts->size;
    return (struct sum){.add = parts->add, .nodes = nodes->count, .own = nodes->node, .part = part,
                        .part_size = parts->size, .size = run->size, .count = count,
                        .parts = list->parts, .ring_bytes = least(bytes, FF_RING_BYTES), .ranks = nodes->ranks,
                        .out = out};
}

static struct piece *receive_part(struct list *list, struct sum *sum, int node, int peer, char **rings)
{
    struct piece *piece = ff_receive_piece(list, peer, *rings, sum->count * sum->part_size);
    piece->sum = sum;
    sum->parts[node] = piece;
    *rings += sum->ring_bytes;
    return piece;
}

/* Elements of a slice of which node m adds the sum. */
static size_t node_begin(const struct nodes *nodes, size_t count, int m)
{
    size_t share = (count + (size_t)nodes->count * UNIT - 1) / ((size_t)nodes->count * UNIT) * UNIT;
    return least((size_t)m * share, count);
}

/* Exchange the part of a slice with those of the same place on the other nodes; `out` becomes the sum. Two nodes
 * exchange all of it, more each a share, of which the sums are passed on as they become ready. */
static void exchange_sums(struct list *list, struct sum *sum, const struct parts *parts, const char *part, size_t count,
                          char *out, char *rings, bool whole)
{
    ff_group *group = list->run->group;
    const struct nodes *nodes = group->nodes;
    size_t size = list->run->size, first = whole ? 0 : node_begin(nodes, count, nodes->node);
    size_t mine = whole ? count : node_begin(nodes, count, nodes->node + 1) - first;
    *sum = sum_of(list, parts, part + first * parts->size, mine, out + first * size);
    list->sum = sum;
    for (int i = 1; i < nodes->count; i++) {
        int m = (nodes->node + i) % nodes->count, peer = member(nodes, m, group->rank);
        size_t begin = whole ? 0 : node_begin(nodes, count, m);
        size_t theirs = whole ? count : node_begin(nodes, count, m + 1) - begin;
        struct piece *leaving = ff_send_piece(list, peer, part + begin * parts->size, theirs * parts->size);
        if (whole && part == out)
            sum->leaving = leaving;     /* of two nodes */
        receive_part(list, sum, m, peer, &rings);
        if (whole)
            continue;
        ff_send_piece(list, peer, sum->out, mine * size)->limit = &sum->ready_bytes;
        ff_receive_piece(list, peer, out + begin * size, theirs * size);
    }
}

static size_t ring_bytes(const struct run *run, size_t bytes)
{
    return (size_t)(run->group->nodes->count - 1) * least((bytes + 63) / 64 * 64, FF_RING_BYTES);
}

/* The parts of all nodes, one by one to each other node, or by doubling; `room` has as much as `room_for_small` says. */
static int add_small(struct run *run, const struct parts *parts, const char *part, char *result, char *room)
{
    const struct nodes *nodes = run->group->nodes;
    uint32_t dtype = run->call->dtype, reduction = run->call->reduction;
    size_t count = run->call->count, bytes = count * parts->size;
    bool half = dtype == FF_F16 || dtype == FF_BF16;
    if (nodes->count == 2 || bytes < nodes->direct_bytes) {
        struct list list = ff_pieces(run);
        struct sum sum;
        exchange_sums(&list, &sum, parts, part, count, result, room, true);
        return ff_carry(&list);
    }
    struct doubled of = {.own = room, .room = room + count * sizeof(uint64_t), .out = result, .count = count,
                         .size = half ? sizeof(float) : run->size,
                         .pair = ff_reduction_of_some(half ? FF_F32 : dtype, reduction),
                         .last = half ? ff_reduction_of_parts(dtype, reduction) : ff_reduction_of(dtype, reduction)};
    const void *sources[] = {part};
    if (half && parts->size == run->size)   /* on their way nothing is rounded */
        ff_reduction_of_some(dtype, reduction)(of.own, sources, 1, 1, count);
    else
        copy(of.own, part, bytes);
    return ff_double_up(run, &of);
}

static size_t room_for_small(const struct run *run, size_t part_bytes)
{
    size_t rings = ring_bytes(run, part_bytes), doubled = 2 * run->call->count * sizeof(uint64_t);
    return rings > doubled ? rings : doubled;
}

/* The first rank of each node adds and exchanges all of it. */
static int reduce_small(struct run *run, const struct parts *parts, size_t bytes)
{
    ff_group *group = run->group;
    size_t count = run->call->count, part_bytes = count * parts->size;
    char *scratch = group->rank ? NULL : ff_scratch(run, part_bytes + bytes + room_for_small(run, part_bytes) + 128);
    char *result = scratch + (part_bytes + 63) / 64 * 64, *room = result + (bytes + 63) / 64 * 64;
    const struct span whole = {run->call->in, count};
    struct span spans[FF_MAX_LOCAL] = {whole};
    const char *part = scratch;
    int status = FF_OK;
    if (!group->rank && !scratch)
        return FF_NO_MEMORY;
    if (group->ranks == 1)
        part = alone(parts, run->call->in, scratch, count);
    else
        status = ff_add_spans(run, spans, scratch, parts->size, parts->some);
    if (!status && !group->rank)
        status = add_small(run, parts, part, result, room);
    if (status)
        return status;
    wait_longer(run);
    size_t shown[FF_MAX_LOCAL] = {bytes};
    char *to[FF_MAX_LOCAL] = {wants_result(run) ? run->call->out : NULL};
    if (!group->rank && to[0])
        copy(to[0], result, bytes);
    return ff_show(run, result, shown, to);
}

static size_t slice_begin(const struct nodes *nodes, size_t count, int place)
{
    size_t slices = (size_t)nodes->leaders, slice = (count + slices * UNIT - 1) / (slices * UNIT) * UNIT;
    return place < nodes->leaders ? least((size_t)place * slice, count) : count;
}

/* A stretch of every slice: while one is exchanged between nodes, the next one is added within them. */
struct stretch {
    struct span spans[FF_MAX_LOCAL];
    size_t shown[FF_MAX_LOCAL];
    char *to[FF_MAX_LOCAL];
    struct list list;
    struct sum sum;
};

/* Stretch `number` of all slices, of `length` elements or what is left. */
static void lay_out_stretch(struct run *run, struct stretch *of, size_t number, size_t length, char *out)
{
    const struct nodes *nodes = run->group->nodes;
    const ff_call *call = run->call;
    for (int q = 0; q < run->group->ranks; q++) {
        size_t end = slice_begin(nodes, call->count, q + 1);
        size_t begin = least(slice_begin(nodes, call->count, q) + number * length, end);
        of->spans[q] = (struct span){(const char *)call->in + begin * run->size, least(length, end - begin)};
        of->shown[q] = of->spans[q].count * run->size;
        of->to[q] = out + begin * run->size;
    }
}

/* Add a stretch within the node, and begin to exchange it. */
static int begin_stretch(struct run *run, const struct parts *parts, struct stretch *of, char *scratch, char *rings)
{
    ff_group *group = run->group;
    const struct span *mine = &of->spans[group->rank];
    const char *part = scratch;
    int status = FF_OK;
    if (group->ranks == 1)
        part = alone(parts, mine->at, scratch, mine->count);
    else
        status = ff_add_spans(run, of->spans, scratch, parts->size, parts->some);
    if (status || !mine->count)
        return status;
    bool whole = group->nodes->count == 2 && parts->size == run->size;
    exchange_sums(&of->list, &of->sum, parts, part, mine->count, of->to[group->rank], rings, whole);
    return FF_OK;
}

static int end_stretch(struct run *run, struct stretch *of)
{
    int status = ff_carry(&of->list);
    return status ? status : ff_show(run, of->to[run->group->rank], of->shown, of->to);
}

static int reduce_large(struct run *run, const struct parts *parts, char *out)
{
    ff_group *group = run->group;
    const struct nodes *nodes = group->nodes;
    bool single = nodes->ranks == nodes->count;     /* nothing to do within any node */
    size_t slice = slice_begin(nodes, run->call->count, 1) - slice_begin(nodes, run->call->count, 0);
    size_t length = single ? slice : least(slice, STRETCH_BYTES / run->size);
    size_t part_bytes = group->ranks == 1 && parts->as_they_are ? 0 : (length * parts->size + 63) / 64 * 64;
    size_t bytes = part_bytes + ring_bytes(run, length * parts->size);
    char *scratch = ff_scratch(run, 2 * bytes + 64);
    struct stretch *of = calloc(2, sizeof *of);
    if (!scratch || !of) {
        free(of);
        return ff_give_up(group, run->report, FF_NO_MEMORY);
    }
    int status = FF_OK;
    for (size_t k = 0; k * length < slice + length && !status; k++) {
        struct stretch *now = &of[k % 2], *before = &of[(k + 1) % 2];
        if (k * length < slice) {
            char *room = scratch + k % 2 * bytes;
            now->list = k % 2 ? ff_more_pieces(run) : ff_pieces(run);
            lay_out_stretch(run, now, k, length, out);
            status = begin_stretch(run, parts, now, room, room + part_bytes);
            if (k > 0)
                before->list.next = &now->list;
            status = status ? status : ff_carry_some(k > 0 ? &before->list : &now->list);
        }
        if (k == 1)
            wait_longer(run);
        status = status || k == 0 ? status : end_stretch(run, before);
    }
    free(of);
    return status;
}

static int all_reduce(struct run *run)
{
    struct parts parts = parts_of(run);
    size_t bytes = block_bytes(run);
    if (!parts.add)
        return FF_UNSUPPORTED;
    if (run->call->count * parts.size <= SMALL_BYTES)
        return reduce_small(run, &parts, bytes);
    if (wants_result(run))
        return reduce_large(run, &parts, run->call->out);
    char *out = malloc(bytes);
    if (!out)
        return ff_give_up(run->group, run->report, FF_NO_MEMORY);
    int status = reduce_large(run, &parts, out);
    free(out);
    return status;
}

/* Rank i of a node adds the blocks of ranks i, i + n, ... of each other node, n being the ranks of its own, and sends
 * them there; its own it adds with what comes of the others. */
static int reduce_scatter(struct run *run)
{
    ff_group *group = run->group;
    const struct nodes *nodes = group->nodes;
    struct parts parts = parts_of(run);
    struct list list = ff_pieces(run);
    size_t count = run->call->count, part_bytes = (count * parts.size + 63) / 64 * 64, blocks = 0;
    bool copies = group->ranks > 1 || !parts.as_they_are;
    if (!parts.add)
        return FF_UNSUPPORTED;
    for (int m = 0; m < nodes->count && copies; m++)
        blocks += (size_t)((members(nodes, m) + group->ranks - 1) / group->ranks);
    char *scratch = ff_scratch(run, blocks * part_bytes + ring_bytes(run, count * parts.size) + 64);
    char *room = scratch, *rings = scratch + blocks * part_bytes;
    if (!scratch)
        return FF_NO_MEMORY;
    struct sum sum = sum_of(&list, &parts, NULL, count, run->call->out);
    list.sum = &sum;
    for (int m = 0; m < nodes->count; m++)
        for (int wave = 0; wave * group->ranks < members(nodes, m); wave++) {
            struct span spans[FF_MAX_LOCAL] = {{0}};
            for (int q = 0; q < group->ranks; q++) {
                int place = wave * group->ranks + q;
                bool is = place < members(nodes, m);
                spans[q] = (struct span){is ? block_in(run, member(nodes, m, place)) : NULL, is ? count : 0};
            }
            const char *part = room;
            if (group->ranks == 1)
                part = alone(&parts, spans[0].at, room, count);
            int status = group->ranks == 1 ? FF_OK : ff_add_spans(run, spans, room, parts.size, parts.some);
            if (status)
                return status;
            room += copies ? part_bytes : 0;
            if (m == nodes->node)
                sum.part = part;
            else if (wave * group->ranks + group->rank < members(nodes, m))
                ff_send_piece(&list, member(nodes, m, wave * group->ranks + group->rank), part, count * parts.size);
        }
    for (int i = 1; i < nodes->count; i++) {
        int m = (nodes->node + i) % nodes->count;
        receive_part(&list, &sum, m, member(nodes, m, group->rank), &rings);
    }
    return ff_carry(&list);
}

/* ---- bytes that go from one to all */

/* Nodes in the order in which a broadcast reaches them, the root's first; which rank of a node takes part. */
static int stage(const struct nodes *nodes, int root, int number)
{
    int node = (nodes->node_of[root] + number) % nodes->count;
    return number ? member(nodes, node, nodes->place[root]) : root;
}

/* From one node to the next; small ones along a binomial tree. */
static int pass_on(struct run *run, char *data, size_t bytes)
{
    const struct nodes *nodes = run->group->nodes;
    int root = run->call->root, count = nodes->count;
    int number = (nodes->node - nodes->node_of[root] + count) % count;
    bool chain = bytes >= CHAIN_BYTES;
    struct list list = ff_pieces(run);
    const size_t *limit = NULL;
    if (number) {
        int before = chain ? number - 1 : number & (number - 1);
        limit = &ff_receive_piece(&list, stage(nodes, root, before), data, bytes)->at;
    }
    if (chain && number + 1 < count)
        ff_send_piece(&list, stage(nodes, root, number + 1), data, bytes)->limit = limit;
    for (int bit = 1; !chain && number + bit < count && (number & (2 * bit - 1)) == 0; bit *= 2)
        ff_send_piece(&list, stage(nodes, root, number + bit), data, bytes)->limit = limit;
    return ff_carry(&list);
}

static int broadcast(struct run *run)
{
    ff_group *group = run->group;
    const struct nodes *nodes = group->nodes;
    const ff_call *call = run->call;
    int number = (nodes->node - nodes->node_of[call->root] + nodes->count) % nodes->count;
    int carrier = ff_local(group, stage(nodes, call->root, number));
    bool root = nodes->rank == call->root;
    char *data = root ? (char *)call->in : call->out;
    size_t bytes = block_bytes(run), shown[FF_MAX_LOCAL] = {0};
    char *to[FF_MAX_LOCAL] = {0};
    int status = group->rank == carrier ? pass_on(run, data, bytes) : FF_OK;
    shown[carrier] = bytes;
    to[carrier] = root ? NULL : call->out;
    wait_longer(run);
    return status ? status : ff_show(run, data, shown, to);
}

/* The first rank of each node takes what the others have, in fewer messages than there are nodes. */
static int gather_small(struct run *run, size_t bytes)
{
    ff_group *group = run->group;
    const struct nodes *nodes = group->nodes;
    size_t *begins = calloc((size_t)nodes->count + 1, sizeof *begins);
    char *all = ff_scratch(run, bytes * (size_t)nodes->ranks + 1), *to[FF_MAX_LOCAL] = {all};
    size_t shown[FF_MAX_LOCAL] = {bytes * (size_t)nodes->ranks};
    int status = FF_OK;
    if (!begins || !all) {
        free(begins);
        return ff_give_up(group, run->report, FF_NO_MEMORY);
    }
    /* Of this node first, then of the one after it, and so on. */
    for (int i = 0; i < nodes->count; i++)
        begins[i + 1] = begins[i] + bytes * (size_t)members(nodes, (nodes->node + i) % nodes->count);
    if (!group->rank) {
        for (int q = 0; q < group->ranks; q++)
            copy(all + (size_t)q * bytes, block_out(run, ff_world(group, q)), bytes);
        status = ff_gather_doubling(run, all, begins);
    }
    wait_longer(run);
    status = status ? status : ff_show(run, all, shown, to);
    for (int i = 1; i < nodes->count && !status; i++) {
        int m = (nodes->node + i) % nodes->count;
        for (int q = 0; q < members(nodes, m); q++)
            copy(block_out(run, member(nodes, m, q)), all + begins[i] + (size_t)q * bytes, bytes);
    }
    free(begins);
    return status;
}

static int all_gather(struct run *run)
{
    ff_group *group = run->group;
    const struct nodes *nodes = group->nodes;
    size_t bytes = block_bytes(run), shown[FF_MAX_LOCAL];
    char *to[FF_MAX_LOCAL];
    struct list list = ff_pieces(run);
    copy(block_out(run, nodes->rank), run->call->in, bytes);
    for (int q = 0; q < group->ranks; q++) {
        shown[q] = bytes;
        to[q] = block_out(run, ff_world(group, q));
    }
    int status = ff_show(run, run->call->in, shown, to);
    if (!status && nodes->count > 2 && bytes >= nodes->direct_bytes && bytes * (size_t)nodes->ranks <= GATHERED_BYTES)
        return gather_small(run, bytes);
    for (int i = 1; i < nodes->count && !status; i++) {
        int m = (nodes->node + i) % nodes->count;
        ff_send_piece(&list, member(nodes, m, group->rank), run->call->in, bytes);
        for (int place = group->rank; place < members(nodes, m); place += group->ranks)
            ff_receive_piece(&list, member(nodes, m, place), block_out(run, member(nodes, m, place)), bytes);
    }
    status = status ? status : ff_carry(&list);
    wait_longer(run);
    for (int m = 0; m < nodes->count && group->ranks > 1; m++)
        for (int wave = 0; m != nodes->node && wave < members(nodes, m) && !status; wave += group->ranks) {
            for (int q = 0; q < group->ranks; q++) {
                bool is = wave + q < members(nodes, m);
                shown[q] = is ? bytes : 0;
                to[q] = is ? block_out(run, member(nodes, m, wave + q)) : NULL;
            }
            status = ff_show(run, to[group->rank], shown, to);
        }
    return status;
}

/* ---- bytes that go from each to some */

/* What goes to a rank and comes from it, on this node or another; NULL where nothing does. */
struct give {
    const char *in;
    char *out;
    size_t in_bytes, out_bytes;
    bool sends, receives;
};

static void between(struct run *run, struct list *list, struct blocks *here, int rank, const struct give *give)
{
    int local = ff_local(run->group, rank);
    if (local >= 0) {
        here->in[local] = give->in;
        here->in_bytes[local] = give->sends ? give->in_bytes : 0;
        here->out[local] = give->out;
        here->out_bytes[local] = give->receives ? give->out_bytes : 0;
        return;
    }
    if (give->sends)
        ff_send_piece(list, rank, give->in, give->in_bytes);
    if (give->receives)
        ff_receive_piece(list, rank, give->out, give->out_bytes);
}

/* Gather, scatter, all to all: from each rank straight to those that it is for. */
static int exchange(struct run *run)
{
    const ff_call *call = run->call;
    const struct nodes *nodes = run->group->nodes;
    size_t block = block_bytes(run);
    bool root = call->root == nodes->rank, uneven = call->kind == FF_ALLTOALLV;
    struct list list = ff_pieces(run);
    struct blocks here = {0};
    const char *in = call->in;
    char *out = call->out;
    for (int q = 0; q < nodes->ranks; q++) {
        struct give give = {.in_bytes = block, .out_bytes = block, .sends = true, .receives = true};
        if (call->kind == FF_GATHER) {
            give.sends = q == call->root;
            give.in = call->in;
            if ((give.receives = root))
                give.out = block_out(run, q);
        } else if (call->kind == FF_SCATTER) {
            give.receives = q == call->root;
            give.out = call->out;
            if ((give.sends = root))
                give.in = block_in(run, q);
        } else if (!uneven) {
            give.in = block_in(run, q);
            give.out = block_out(run, q);
        } else {
            give.in = call->ins ? call->ins[q] : in;
            give.out = call->outs ? call->outs[q] : out;
            give.in_bytes = call->in_counts[q] * run->size;
            give.out_bytes = call->out_counts[q] * run->size;
            in += call->ins ? 0 : give.in_bytes;
            out += call->outs ? 0 : give.out_bytes;
        }
        between(run, &list, &here, q, &give);
    }
    int status = ff_swap(run, &here);
    return status ? status : ff_carry(&list);
}

static int barrier(struct run *run)
{
    int status = ff_turn(run);
    if (!status && !run->group->rank)
        status = ff_meet_leaders(run);
    wait_longer(run);
    return status ? status : ff_turn(run);
}

int ff_execute_on_nodes(struct run *run)
{
    static int (*const kinds[FF_KINDS])(struct run *) = {
        [FF_ALLREDUCE] = all_reduce,   [FF_REDUCE] = all_reduce, [FF_BROADCAST] = broadcast,
        [FF_ALLGATHER] = all_gather,   [FF_GATHER] = exchange,   [FF_SCATTER] = exchange,
        [FF_ALLTOALL] = exchange,      [FF_ALLTOALLV] = exchange, [FF_BARRIER] = barrier,
        [FF_REDUCE_SCATTER] = reduce_scatter,
    };
    int status = kinds[run->call->kind](run);
    run->report->started_ns = 0;        /* clocks of nodes differ */
    /* The other nodes do not see what this one's ranks asked for, and would wait for it. */
    return status == FF_MISMATCH ? ff_give_up(run->group, run->report, status) : status;
}
