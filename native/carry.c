/* Moving pieces of tensors between nodes: whoever waits moves what can be moved, and adds what has come. */
#define _GNU_SOURCE
#include "carry.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>

static const uint64_t LOOK_NS = 50 * 1000 * 1000, CONNECTING_NS = 1000 * 1000;
const size_t FF_ADDED_BYTES = 64 * 1024;
#ifdef FF_READ_ALL
const size_t FF_RING_BYTES = 2 * 64 * 1024;     /* for tests */
#else
const size_t FF_RING_BYTES = 16 * 64 * 1024;
#endif
enum { PIECES_PER_RANK = 4, MORE_PIECES = 4, LISTS = 2, HEAD = sizeof(struct head) };
enum { TOLD = POLLIN | POLLPRI };      /* of a stream that leads to another rank */

static size_t most_pieces(const struct nodes *nodes)
{
    return (size_t)(PIECES_PER_RANK * nodes->ranks + MORE_PIECES);
}

bool ff_pieces_open(struct nodes *nodes)
{
    nodes->pieces = calloc(LISTS * most_pieces(nodes), sizeof(struct piece));
    nodes->polled = calloc(LISTS * 2 * most_pieces(nodes), sizeof(struct pollfd));
    nodes->parts = calloc(LISTS * (size_t)nodes->count, sizeof *nodes->parts);
    return nodes->pieces && nodes->polled && nodes->parts;
}

struct list ff_pieces(struct run *run)
{
    struct nodes *nodes = run->group->nodes;
    return (struct list){.run = run, .pieces = nodes->pieces, .parts = nodes->parts};
}

struct list ff_more_pieces(struct run *run)
{
    struct nodes *nodes = run->group->nodes;
    return (struct list){.run = run, .pieces = nodes->pieces + most_pieces(nodes), .parts = nodes->parts + nodes->count};
}

static struct piece *add_piece(struct list *list, int peer, void *data, size_t bytes, bool sends)
{
    const ff_call *call = list->run->call;
    struct piece *piece = &list->pieces[list->count++];
    *piece = (struct piece){.peer = peer, .sends = sends, .data = data, .bytes = bytes};
    if (sends)
        piece->head = (struct head){ff_what(call), call->root, call->count, bytes, list->run->report->sequence};
    return piece;
}

struct piece *ff_send_piece(struct list *list, int peer, const void *data, size_t bytes)
{
    return add_piece(list, peer, (char *)data, bytes, true);
}

struct piece *ff_receive_piece(struct list *list, int peer, void *data, size_t bytes)
{
    return add_piece(list, peer, data, bytes, false);
}

char *ff_scratch(struct run *run, size_t bytes)
{
    struct nodes *nodes = run->group->nodes;
    if (bytes > nodes->scratch_bytes) {
        free(nodes->scratch);
        nodes->scratch_bytes = 0;
        if ((nodes->scratch = malloc(bytes)))
            nodes->scratch_bytes = bytes;
        else
            ff_give_up(run->group, run->report, FF_NO_MEMORY);
    }
    return nodes->scratch;
}

static bool over(const struct piece *piece)
{
    return piece->head_at == HEAD && piece->at == piece->bytes;
}

/* What came is of another operation than this rank's, or of another size. */
static int check(struct list *list, const struct piece *piece)
{
    const ff_call *call = list->run->call;
    ff_report *report = list->run->report;
    const struct head *head = &piece->head;
    if (head->what == ff_what(call) && head->root == call->root && head->count == call->count &&
        head->bytes == piece->bytes && head->sequence == report->sequence)
        return FF_OK;
    if ((head->what & 0xff) >= FF_KINDS || (head->what >> 8 & 0xff) >= FF_DTYPES ||
        head->what >> 16 >= FF_REDUCTIONS) {
        ff_miss(report, piece->peer);
        return ff_give_up(list->run->group, report, FF_DAMAGED);
    }
    report->other = piece->peer;
    report->other_kind = head->what & 0xff;
    report->other_dtype = head->what >> 8 & 0xff;
    report->other_reduction = head->what >> 16 & 0xff;
    report->other_root = head->root;
    report->other_count = head->count;
    if (report->other_kind == FF_ALLTOALLV && call->kind == FF_ALLTOALLV) {
        report->other_root = ff_own(list->run->group);
        report->other_count = head->bytes;
    }
    return ff_give_up(list->run->group, report, FF_MISMATCH);
}

static int send_some(struct list *list, struct piece *piece, bool *moved)
{
    ff_group *group = list->run->group;
    size_t there = piece->limit ? least(*piece->limit, piece->bytes) : piece->bytes;
    size_t head_at = piece->head_at;
    if (head_at == HEAD && piece->at == there)
        return FF_OK;
    if (ff_stream_to(group, FF_COLLECTIVES, piece->peer) < 0)
        return ff_stream_unreachable(group, piece->peer, list->run->report);
    struct stream *stream = ff_stream(group, FF_COLLECTIVES, piece->peer);
    long sent = ff_stream_send(group, stream, &piece->head, &piece->head_at, piece->data + piece->at,
                               there - piece->at, piece->bytes - piece->at);
    if (sent < 0)
        return ff_stream_lost(group, FF_COLLECTIVES, piece->peer, list->run->report);
    piece->at += (size_t)sent;
    *moved |= sent > 0 || piece->head_at > head_at;
    return FF_OK;
}

/* Where the next bytes go, and how many fit there. */
static char *room(const struct piece *piece, size_t *bytes)
{
    const struct sum *sum = piece->sum;
    *bytes = piece->bytes - piece->at;
    if (!sum || !*bytes)
        return piece->data + piece->at;
    size_t start = piece->at % sum->ring_bytes, taken = piece->at - sum->added * sum->part_size;
    *bytes = least(*bytes, least(sum->ring_bytes - taken, sum->ring_bytes - start));
    return piece->data + start;
}

static int receive_some(struct list *list, struct piece *piece, bool *moved)
{
    ff_group *group = list->run->group;
    struct stream *stream = ff_stream(group, FF_COLLECTIVES, piece->peer);
    size_t bytes, head_at = piece->head_at;
    char *to = room(piece, &bytes);
    if (ff_stream_never_came(stream)) {
        errno = 0;
        return ff_stream_lost(group, FF_COLLECTIVES, piece->peer, list->run->report);
    }
    if (atomic_load(&stream->in) < 0 || (head_at == HEAD && !bytes))
        return FF_OK;
    long got = ff_stream_receive(group, stream, &piece->head, &piece->head_at, to, bytes);
    if (got < 0)
        return ff_stream_lost(group, FF_COLLECTIVES, piece->peer, list->run->report);
    piece->at += (size_t)got;
    *moved |= got > 0 || piece->head_at > head_at;
    return head_at < HEAD && piece->head_at == HEAD ? check(list, piece) : FF_OK;
}

/* Of each peer and direction the first that is not over; nothing else is touched. */
static bool is_first(struct nodes *nodes, const struct piece *piece)
{
    uint64_t *turn = &nodes->turns[piece->sends][piece->peer];
    bool first = *turn != nodes->turn;
    *turn = nodes->turn;
    return first;
}

static int move_list(struct list *list, bool *moved, bool *left)
{
    struct nodes *nodes = list->run->group->nodes;
    for (int i = 0; i < list->count; i++) {
        struct piece *piece = &list->pieces[i];
        if (over(piece) || !is_first(nodes, piece))
            continue;
        int status = piece->sends ? send_some(list, piece, moved) : receive_some(list, piece, moved);
        if (status)
            return status;
        *left |= !over(piece);
        if (over(piece))
            nodes->turns[piece->sends][piece->peer] = 0;    /* the next one may follow */
    }
    return FF_OK;
}

/* Elements that all have sent, and that this rank no longer needs where the result goes. */
static size_t there(const struct sum *sum)
{
    size_t count = sum->count;
    for (int m = 0; m < sum->nodes; m++)
        if (m != sum->own)
            count = least(count, sum->parts[m]->at / sum->part_size);
    if (sum->leaving)
        count = least(count, sum->leaving->at / sum->part_size);
    return count;
}

static bool add_up(struct sum *sum)
{
    const void *sources[FF_MAX_RANKS];
    size_t whole = FF_ADDED_BYTES / sum->part_size, before = sum->added;
    for (size_t until = there(sum); sum->added < until;) {
        size_t at = sum->added * sum->part_size, piece = least(whole, sum->count - sum->added);
        if (until - sum->added < piece)
            break;
        for (int m = 0; m < sum->nodes; m++)
            sources[m] = m == sum->own ? sum->part + at : sum->parts[m]->data + at % sum->ring_bytes;
        sum->add(sum->out + sum->added * sum->size, sources, sum->nodes, sum->ranks, piece);
        sum->added += piece;
        sum->ready_bytes = sum->added * sum->size;
    }
    return sum->added > before;
}

/* `left`: of the first list. */
static int move(struct list *first, bool *moved, bool *left)
{
    bool later;
    first->run->group->nodes->turn++;
    for (struct list *list = first; list; list = list->next) {
        int status = move_list(list, moved, list == first ? left : &later);
        if (status)
            return status;
        if (!list->sum)
            continue;
        *moved |= add_up(list->sum);
        if (list == first)
            *left |= list->sum->added < list->sum->count;
    }
    return FF_OK;
}

/* Sums that others pass on wait for parts as this rank's do: who has not sent a part is to be named. */
static int late(struct list *list)
{
    struct run *run = list->run;
    bool parts = false;
    for (int i = 0; i < list->count; i++)
        parts |= list->pieces[i].sum && !over(&list->pieces[i]);
    for (int i = 0; i < list->count; i++)
        if (!over(&list->pieces[i]) && (!parts || list->pieces[i].sum))
            ff_miss(run->report, list->pieces[i].peer);
    return ff_give_up(run->group, run->report, FF_TIMEOUT);
}

/* What the pieces of a list wait for: how many descriptors, or an error below 0. */
static int watch_list(struct list *list, int count, uint64_t *most_ns)
{
    struct run *run = list->run;
    struct nodes *nodes = run->group->nodes;
    for (int i = 0; i < list->count; i++) {
        const struct piece *piece = &list->pieces[i];
        if (over(piece) || !is_first(nodes, piece))
            continue;
        const struct stream *stream = ff_stream(run->group, FF_COLLECTIVES, piece->peer);
        size_t bytes = 1;
        if (!piece->sends)
            room(piece, &bytes);
        bool waits = piece->sends ? !piece->limit || *piece->limit > piece->at : bytes > 0;
        int in = atomic_load(&stream->in), out = ff_stream_to(run->group, FF_COLLECTIVES, piece->peer);
        if (out < 0)            /* a stream to the other tells of its end, whether or not it has opened one */
            return -ff_stream_unreachable(run->group, piece->peer, run->report);
        if (!piece->sends && in < 0)
            *most_ns = CONNECTING_NS;
        else if (!piece->sends && waits)
            nodes->polled[count++] = (struct pollfd){.fd = in, .events = POLLIN};
        if (!atomic_load(&stream->ended_out))
            nodes->polled[count++] =
                (struct pollfd){.fd = out, .events = TOLD | (piece->sends && waits ? POLLOUT : 0)};
    }
    return count;
}

/* Until something may have changed. */
static int sleep_for(struct list *first)
{
    struct run *run = first->run;
    struct nodes *nodes = run->group->nodes;
    uint64_t now_ns = ff_now_ns(), most_ns = LOOK_NS;
    int count = 0;
    nodes->turn++;
    for (struct list *list = first; list; list = list->next)
        if ((count = watch_list(list, count, &most_ns)) < 0)
            return -count;
    uint64_t deadline_ns = run->patience.deadline_ns;
    deadline_ns += deadline_ns == UINT64_MAX ? 0 : FF_GRACE_NS;
    if (now_ns >= deadline_ns)
        return late(first);
    uint64_t ns = deadline_ns - now_ns < most_ns ? deadline_ns - now_ns : most_ns;
    const struct timespec time = {.tv_nsec = (long)ns};
    bool told = false;
    if (ppoll(nodes->polled, (nfds_t)count, &time, NULL) > 0)
        for (int i = 0; i < count; i++)
            told |= nodes->polled[i].revents & TOLD && (nodes->polled[i].events & TOLD) == TOLD;
    if (told)
        ff_streams_hear(run->group);
    return ff_is_broken(run->group, run->report) ? FF_BROKEN : FF_OK;
}

int ff_carry(struct list *list)
{
    struct patience patience = list->run->patience;
    for (;;) {
        bool moved = false, left = false;
        int status = move(list, &moved, &left);
        if (status || !left)
            return status;
        if (moved)
            patience = list->run->patience;
        else if (!ff_bide(&patience) && (status = sleep_for(list)))
            return status;
    }
}

int ff_carry_some(struct list *list)
{
    bool moved, left;
    return move(list, &moved, &left);
}
