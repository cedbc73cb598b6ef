/* Moving pieces of tensors between nodes: whoever waits moves what can be moved, and adds what has come.
 *
 *     rail 0   head | unit 0 | head | unit 2 | head | unit 3 ...      a piece of several units, by two streams
 *     rail 1   head | unit 1 | ............... head | unit 4 ...      each takes the next one when it has room
 *
 * A small piece, and every one where there is one rail, is one unit. Heads tell the place of what follows among all that
 * goes from one rank to another, where each piece takes one place more than it has bytes: so one that belongs to a later
 * piece is known, and waits.
 */
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
static const size_t UNIT_BYTES = 8 * 1024;
#else
static const size_t UNIT_BYTES = 2 * 64 * 1024;
const size_t FF_RING_BYTES = 16 * 64 * 1024;
#endif
enum { AHEAD = 64 };            /* units that may have come before an earlier one */
enum { PIECES_PER_RANK = 4, MORE_PIECES = 4, LISTS = 2, HEAD = sizeof(struct head) };

static size_t most_pieces(const struct nodes *nodes)
{
    return (size_t)(PIECES_PER_RANK * nodes->ranks + MORE_PIECES);
}

bool ff_pieces_open(struct nodes *nodes)
{
    nodes->pieces = calloc(LISTS * most_pieces(nodes), sizeof(struct piece));
    nodes->polled = calloc(4 * (size_t)nodes->ranks * (size_t)nodes->rails, sizeof(struct pollfd));
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
    struct piece *piece = &list->pieces[list->count++];
    *piece = (struct piece){.peer = peer, .sends = sends, .data = data, .bytes = bytes};
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

/* How many streams a piece goes by: never more than it has units. */
static int rails(const struct nodes *nodes, const struct piece *piece)
{
    size_t units = piece->bytes ? (piece->bytes - 1) / UNIT_BYTES + 1 : 1;
    return (int)least(units, (size_t)nodes->rails);
}

static size_t unit_bytes(const struct nodes *nodes, const struct piece *piece)
{
    return rails(nodes, piece) > 1 ? UNIT_BYTES : piece->bytes ? piece->bytes : 1;
}

static int lane_of(int rail)
{
    return rail ? FF_LANES + rail - 1 : FF_COLLECTIVES;
}

/* What came is of another operation than this rank's, or of another size. */
static int check(struct list *list, const struct piece *piece, const struct head *head)
{
    const ff_call *call = list->run->call;
    ff_report *report = list->run->report;
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

/* Give a stream the next unit of a piece, if there is one. */
static void give(const struct list *list, struct piece *piece, struct way *way)
{
    const struct run *run = list->run;
    const ff_call *call = run->call;
    struct nodes *nodes = run->group->nodes;
    size_t from = piece->given, end = least(from + unit_bytes(nodes, piece), piece->bytes);
    /* One of several goes once it is all there: a stream that waited for it could not take another. */
    if ((piece->begun && from == piece->bytes) || (rails(nodes, piece) > 1 && piece->limit && *piece->limit < end))
        return;
    *way = (struct way){.head = {ff_what(call), call->root, call->count, piece->bytes, run->report->sequence,
                                 nodes->places[true][piece->peer] + from},
                        .at = from, .end = end, .busy = true};
    piece->given = end;
    piece->begun = true;
}

static size_t there_of(const struct piece *piece, const struct way *way)
{
    return piece->limit ? least(*piece->limit, way->end) : way->end;
}

static int send_by(struct list *list, struct piece *piece, int rail, bool *moved)
{
    ff_group *group = list->run->group;
    int lane = lane_of(rail);
    struct stream *stream = ff_stream(group, lane, piece->peer);
    struct way *way = &stream->going;
    if (!way->busy)
        give(list, piece, way);
    size_t there = there_of(piece, way), head_at = way->head_at;
    if (!way->busy || (head_at == HEAD && way->at == there))
        return FF_OK;
    if (ff_stream_to(group, lane, piece->peer) < 0)
        return ff_stream_unreachable(group, piece->peer, list->run->report);
    long sent = ff_stream_send(group, stream, &way->head, &way->head_at, piece->data + way->at, there - way->at,
                               way->end - way->at);
    if (sent < 0)
        return ff_stream_lost(group, lane, piece->peer, list->run->report);
    way->at += (size_t)sent;
    way->busy = way->head_at < HEAD || way->at < way->end;
    *moved |= sent > 0 || way->head_at > head_at;
    return FF_OK;
}

static int send_some(struct list *list, struct piece *piece, bool *moved)
{
    ff_group *group = list->run->group;
    size_t at = SIZE_MAX;       /* where the first stream is that is not done */
    for (int rail = 0; rail < rails(group->nodes, piece); rail++) {
        int status = send_by(list, piece, rail, moved);
        if (status)
            return status;
        const struct way *way = &ff_stream(group, lane_of(rail), piece->peer)->going;
        at = way->busy ? least(at, way->at) : at;
    }
    piece->at = least(at, piece->given);
    piece->over = piece->begun && at == SIZE_MAX && piece->given == piece->bytes;
    return FF_OK;
}

/* Where the next bytes go, and how many fit there. */
static char *room(const struct piece *piece, const struct way *way, size_t *bytes)
{
    const struct sum *sum = piece->sum;
    *bytes = way->end - way->at;
    if (!sum || !*bytes)
        return piece->data + way->at;
    size_t start = way->at % sum->ring_bytes, until = sum->added * sum->part_size + sum->ring_bytes;
    *bytes = until > way->at ? least(*bytes, least(until - way->at, sum->ring_bytes - start)) : 0;
    return piece->data + start;
}

static int damaged(struct list *list, const struct piece *piece)
{
    ff_miss(list->run->report, piece->peer);
    return ff_give_up(list->run->group, list->run->report, FF_DAMAGED);
}

/* A head has come: what follows it is of this piece, or waits for a later one. */
static int begin(struct list *list, struct piece *piece, struct way *way)
{
    ff_group *group = list->run->group;
    uint64_t from = way->head.place - group->nodes->places[false][piece->peer];
    size_t bytes = unit_bytes(group->nodes, piece), unit = (size_t)(from / bytes);
    if (from > piece->bytes && from < UINT64_MAX / 2)
        return FF_OK;
    int status = check(list, piece, &way->head);
    if (status)
        return status;
    if (from % bytes || from > piece->bytes || (from && from == piece->bytes) || unit < piece->unit)
        return damaged(list, piece);
    if (unit - piece->unit >= AHEAD)
        return FF_OK;
    bool twice = piece->came >> (unit - piece->unit) & 1;
    for (int rail = 0; rail < rails(group->nodes, piece); rail++) {
        const struct way *other = &ff_stream(group, lane_of(rail), piece->peer)->coming;
        twice |= other->busy && other->unit == unit;
    }
    if (twice)
        return damaged(list, piece);
    way->unit = unit;
    way->at = (size_t)from;
    way->end = least(way->at + bytes, piece->bytes);
    way->busy = true;
    return FF_OK;
}

/* Nothing more comes by a stream: unless it ends in the middle of something, others may bring what was sent before. */
static int ended(struct list *list, const struct piece *piece, int rail)
{
    ff_group *group = list->run->group;
    struct stream *stream = ff_stream(group, lane_of(rail), piece->peer);
    bool midway = errno != 0 || stream->coming.busy || stream->coming.head_at % HEAD;
    atomic_store(&stream->ended_in, true);
    return midway ? ff_stream_lost(group, lane_of(rail), piece->peer, list->run->report) : FF_OK;
}

/* Whether what is missing of a piece can come by none of its streams: they have ended, or are at a later unit or piece. */
static int check_end(struct list *list, const struct piece *piece)
{
    ff_group *group = list->run->group;
    int over = -1;
    for (int rail = 0; rail < rails(group->nodes, piece); rail++) {
        const struct stream *stream = ff_stream(group, lane_of(rail), piece->peer);
        const struct way *way = &stream->coming;
        bool awaited = way->busy ? way->unit == piece->unit : way->head_at < HEAD;
        if (atomic_load(&stream->ended_in) || ff_stream_never_came(group, lane_of(rail), piece->peer))
            over = rail;
        else if (awaited)
            return FF_OK;
    }
    errno = 0;
    return over < 0 ? damaged(list, piece) : ff_stream_lost(group, lane_of(over), piece->peer, list->run->report);
}

static int receive_by(struct list *list, struct piece *piece, int rail, bool *moved)
{
    ff_group *group = list->run->group;
    struct stream *stream = ff_stream(group, lane_of(rail), piece->peer);
    struct way *way = &stream->coming;
    size_t bytes = 0, head_at = way->head_at;
    char *to = NULL;
    int status = FF_OK;
    if (atomic_load(&stream->in) < 0 || atomic_load(&stream->ended_in))
        return FF_OK;
    if (head_at == HEAD && !way->busy && (status = begin(list, piece, way)))
        return status;
    bool alone = !way->busy && rails(group->nodes, piece) == 1;    /* nothing else can come: received with its head */
    if (alone)
        *way = (struct way){.head = way->head, .head_at = head_at, .end = piece->bytes};
    if (way->busy || alone)
        to = room(piece, way, &bytes);
    if (head_at == HEAD && !bytes)
        return FF_OK;
    long got = ff_stream_receive(group, stream, &way->head, &way->head_at, to, bytes);
    if (got < 0)
        return ended(list, piece, rail);
    *moved |= got > 0 || way->head_at > head_at;
    if (head_at < HEAD && way->head_at == HEAD)
        status = begin(list, piece, way);
    way->at += (size_t)got;
    return status;
}

/* A stream has brought some of a piece: how much of it is there without a gap. */
static void note(struct piece *piece, struct way *way, size_t bytes)
{
    if (!way->busy)
        return;
    piece->begun = true;
    if (way->at == way->end) {
        way->busy = false;
        way->head_at = 0;
        piece->came |= UINT64_C(1) << (way->unit - piece->unit);
    } else if (way->unit == piece->unit) {
        piece->at = way->at;
    }
    for (; piece->came & 1; piece->came >>= 1)
        piece->at = least(++piece->unit * bytes, piece->bytes);
}

static int receive_some(struct list *list, struct piece *piece, bool *moved)
{
    ff_group *group = list->run->group;
    for (int rail = 0; rail < rails(group->nodes, piece) && !piece->over; rail++) {
        int status = receive_by(list, piece, rail, moved);
        if (status)
            return status;
        note(piece, &ff_stream(group, lane_of(rail), piece->peer)->coming, unit_bytes(group->nodes, piece));
        piece->over = piece->begun && piece->at == piece->bytes;
    }
    return piece->over ? FF_OK : check_end(list, piece);
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
        if (piece->over || !is_first(nodes, piece))
            continue;
        int status = piece->sends ? send_some(list, piece, moved) : receive_some(list, piece, moved);
        if (status)
            return status;
        *left |= !piece->over;
        if (!piece->over)
            continue;
        nodes->turns[piece->sends][piece->peer] = 0;    /* the next one may follow */
        nodes->places[piece->sends][piece->peer] += piece->bytes + 1;
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

/* The next piece, from `from` on, that keeps the others from their end; NULL: none. Sums that others pass on wait for
 * parts as this rank's do: who has not sent a part is to be named. */
static const struct piece *awaited(const struct list *list, int from)
{
    bool parts = false;
    for (int i = 0; i < list->count; i++)
        parts |= list->pieces[i].sum && !list->pieces[i].over;
    for (int i = from; i < list->count; i++)
        if (!list->pieces[i].over && (!parts || list->pieces[i].sum))
            return &list->pieces[i];
    return NULL;
}

static int late(struct list *list)
{
    ff_report *report = list->run->report;
    for (const struct piece *piece = awaited(list, 0); piece; piece = awaited(list, (int)(piece - list->pieces) + 1))
        ff_miss(report, piece->peer);
    ff_held_up(list->run->group, report);
    return ff_give_up(list->run->group, report, FF_TIMEOUT);
}

/* Tell other threads what is waited for. */
static void tell_of(const struct list *list)
{
    struct held_up *held_up = &list->run->group->nodes->held_up;
    const struct piece *piece = awaited(list, 0);
    if (!piece)
        return;
    atomic_store(&held_up->sends, piece->sends);
    atomic_store(&held_up->moved, piece->at);
    atomic_store(&held_up->bytes, piece->bytes);
    atomic_store(&held_up->peer, piece->peer + 1);
}

int ff_held_up(ff_group *group, ff_report *report)
{
    const struct held_up *held_up = group->nodes ? &group->nodes->held_up : NULL;
    int peer = held_up ? atomic_load(&held_up->peer) : 0;
    if (!peer)
        return 0;
    report->other = peer - 1;
    report->other_root = atomic_load(&held_up->sends);
    report->other_count = atomic_load(&held_up->moved);
    report->other_bytes = atomic_load(&held_up->bytes);
    return 1;
}

/* What a piece waits for on one of its streams: how many descriptors, or an error below 0. */
static int watch_rail(struct list *list, const struct piece *piece, int rail, int count, uint64_t *most_ns, int naps)
{
    struct run *run = list->run;
    struct nodes *nodes = run->group->nodes;
    const struct stream *stream = ff_stream(run->group, lane_of(rail), piece->peer);
    const struct way *going = &stream->going, *coming = &stream->coming;
    size_t bytes = 1;
    if (!piece->sends && coming->busy)
        room(piece, coming, &bytes);
    bool waits = piece->sends ? going->busy && (going->head_at < HEAD || there_of(piece, going) > going->at)
                              : bytes > 0 && (coming->busy || coming->head_at < HEAD) && !atomic_load(&stream->ended_in);
    int in = atomic_load(&stream->in), out = atomic_load(&stream->out);
    if (out < 0 && !rail)       /* a stream to the other tells of its end, whether or not it has opened one */
        out = ff_stream_to(run->group, FF_COLLECTIVES, piece->peer);
    if (out < 0 && !rail)
        return -ff_stream_unreachable(run->group, piece->peer, run->report);
    if (!piece->sends && in < 0)    /* the first one is opened at once, others when it has no room */
        *most_ns = least(*most_ns, rail ? 10 * CONNECTING_NS : CONNECTING_NS);
    else if (waits && (piece->sends ? !!stream->mpi_out : !!stream->mpi_in))
        *most_ns = least(*most_ns, ff_mpi_nap_ns(naps));
    else if (!piece->sends && waits)
        nodes->polled[count++] = (struct pollfd){.fd = in, .events = POLLIN};
    if (out >= 0 && !atomic_load(&stream->ended_out))
        nodes->polled[count++] = (struct pollfd){.fd = out, .events = TOLD | (piece->sends && waits && !stream->mpi_out ? POLLOUT : 0)};
    return count;
}

static int watch_list(struct list *list, int count, uint64_t *most_ns, int naps)
{
    struct nodes *nodes = list->run->group->nodes;
    for (int i = 0; i < list->count; i++) {
        const struct piece *piece = &list->pieces[i];
        if (piece->over || !is_first(nodes, piece))
            continue;
        for (int rail = 0; rail < rails(nodes, piece) && count >= 0; rail++)
            count = watch_rail(list, piece, rail, count, most_ns, naps);
        if (count < 0)
            return count;
    }
    return count;
}

/* Until something may have changed, after so many naps in which nothing has. */
static int sleep_for(struct list *first, int naps)
{
    struct run *run = first->run;
    struct nodes *nodes = run->group->nodes;
    uint64_t now_ns = ff_now_ns(), most_ns = LOOK_NS;
    int count = 0;
    nodes->turn++;
    for (struct list *list = first; list; list = list->next)
        if ((count = watch_list(list, count, &most_ns, naps)) < 0)
            return -count;
    uint64_t deadline_ns = run->patience.deadline_ns;
    deadline_ns += deadline_ns == UINT64_MAX ? 0 : FF_GRACE_NS;
    tell_of(first);
    if (now_ns >= deadline_ns)
        return late(first);
    uint64_t ns = deadline_ns - now_ns < most_ns ? deadline_ns - now_ns : most_ns;
    const struct timespec time = {.tv_nsec = (long)ns};
    bool told = false;
    if (ppoll(nodes->polled, (nfds_t)count, &time, NULL) > 0)
        for (int i = 0; i < count; i++)
            told |= tells(&nodes->polled[i]);
    if (told)
        ff_streams_hear(run->group);
    return ff_is_broken(run->group, run->report) ? FF_BROKEN : FF_OK;
}

int ff_carry(struct list *list)
{
    struct patience patience = list->run->patience;
    bool left = true;
    int status = FF_OK, naps = 0;
    while (left && !status) {
        bool moved = false;
        left = false;
        status = move(list, &moved, &left);
        if (moved)
            patience = list->run->patience, naps = 0;
        else if (!status && left && !ff_bide(&patience))
            status = sleep_for(list, naps++);
    }
    atomic_store_explicit(&list->run->group->nodes->held_up.peer, 0, memory_order_relaxed);
    return status;
}

int ff_carry_some(struct list *list)
{
    bool moved, left;
    return move(list, &moved, &left);
}
