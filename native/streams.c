/* Streams between ranks on different nodes: connected sockets, which Python opens and takes.
 *
 *     rank 0                                                  rank 1
 *     out  ── head | data | head | data ... | LEFT ──────►  in
 *          ◄───────────────────────── GAVE_UP, LEFT ───────
 *     in   ◄── ... (a socket of its own, opened by rank 1) ──  out
 *
 * Each pair has one a direction and lane, so that collectives never wait behind messages that nobody receives yet, and
 * large tensors of collectives may go by several.
 * What a rank has to tell of the end of the group it tells on all its streams, against their direction too.
 */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

enum { HEAD = sizeof(struct head), GRACE_MS = 20 };
static const uint64_t HANDSHAKE_NS = 500 * 1000 * 1000;
/* Sent in one call: others are served in between. */
static const size_t MOST_BYTES = 1 << 20;

static bool place_ranks(struct nodes *nodes, const int32_t *node_of)
{
    size_t n = (size_t)nodes->ranks;
    nodes->node_of = calloc(n, sizeof(int));
    nodes->place = calloc(n, sizeof(int));
    nodes->members = calloc(n, sizeof(int));
    for (int q = 0; q < nodes->ranks; q++)
        if (node_of[q] >= nodes->count)
            nodes->count = node_of[q] + 1;
    nodes->begins = calloc((size_t)nodes->count + 1, sizeof(int));
    if (!nodes->node_of || !nodes->place || !nodes->members || !nodes->begins)
        return false;
    nodes->leaders = nodes->ranks;
    for (int m = 0, at = 0; m < nodes->count; m++) {
        nodes->begins[m] = at;
        for (int q = 0; q < nodes->ranks; q++) {
            if (node_of[q] != m)
                continue;
            nodes->node_of[q] = m;
            nodes->place[q] = at - nodes->begins[m];
            nodes->members[at++] = q;
        }
        nodes->begins[m + 1] = at;
        if (at - nodes->begins[m] < nodes->leaders)
            nodes->leaders = at - nodes->begins[m];
    }
    nodes->node = nodes->node_of[nodes->rank];
    return true;
}

int ff_group_spread(ff_group *group, int rank, int ranks, const int32_t *node_of, ff_connect connect,
                    void *self, const int *wakers, int rails, int rounds, uint64_t direct_bytes)
{
    struct nodes *nodes = calloc(1, sizeof *nodes);
    if (!nodes)
        return -1;
    group->nodes = nodes;
    nodes->rank = rank;
    nodes->ranks = ranks;
    nodes->connect = connect;
    nodes->self = self;
    nodes->rounds = rounds;
    nodes->direct_bytes = direct_bytes;
    nodes->rails = rails < 1 ? 1 : rails > FF_MAX_RAILS ? FF_MAX_RAILS : rails;
    nodes->lanes = FF_LANES + nodes->rails - 1;
    nodes->told = calloc(1, sizeof(struct head));
    pthread_mutex_init(&nodes->telling, NULL);
    for (int q = 0; q < group->ranks; q++)
        group->peers[q].waker = wakers[q];
    bool fits = nodes->told && place_ranks(nodes, node_of);
    for (int lane = 0; lane < nodes->lanes && fits; lane++) {
        nodes->streams[lane] = calloc((size_t)ranks, sizeof(struct stream));
        fits = nodes->streams[lane] != NULL;
        for (int q = 0; q < ranks && fits; q++) {
            struct stream *stream = &nodes->streams[lane][q];
            atomic_init(&stream->out, -1);
            atomic_init(&stream->in, -1);
            pthread_mutex_init(&stream->lock, NULL);
        }
    }
    for (int way = 0; way < 2 && fits; way++)
        fits = (nodes->turns[way] = calloc((size_t)ranks, sizeof(uint64_t))) &&
               (nodes->places[way] = calloc((size_t)ranks, sizeof(uint64_t)));
    return fits && ff_pieces_open(nodes) ? 0 : -1;
}

int ff_group_by_mpi(ff_group *group, const int32_t *mpi_ranks)
{
    struct nodes *nodes = group->nodes;
    if (!(nodes->mpi_ranks = calloc((size_t)nodes->ranks, sizeof(int))))
        return -1;
    for (int q = 0; q < nodes->ranks; q++)
        nodes->mpi_ranks[q] = mpi_ranks[q];
    return 0;
}

int ff_group_accept(ff_group *group, int rank, int lane, int descriptor, int tag)
{
    const struct nodes *nodes = group->nodes;
    if (!nodes || rank < 0 || rank >= nodes->ranks || lane < 0 || lane >= nodes->lanes || (tag < 0) != !nodes->mpi_ranks)
        return -1;
    struct stream *stream = ff_stream(group, lane, rank);
    if (atomic_load(&stream->in) >= 0 || (tag >= 0 && !(stream->mpi_in = ff_mpi_in(nodes->mpi_ranks[rank], tag))))
        return -1;
    atomic_store(&stream->in, descriptor);
    ff_ring_bell(group, group->rank);
    if (atomic_load(&group->nodes->tells))
        send(descriptor, group->nodes->told, HEAD, MSG_DONTWAIT | MSG_NOSIGNAL);
    return 0;
}

void ff_group_forget(ff_group *group)
{
    for (int lane = 0; group->nodes && lane < group->nodes->lanes; lane++)
        for (int q = 0; q < group->nodes->ranks; q++) {
            struct stream *stream = &group->nodes->streams[lane][q];
            int ends[] = {atomic_load(&stream->out), atomic_load(&stream->in)};
            for (int i = 0; i < 2; i++)
                if (ends[i] >= 0)
                    close(ends[i]);
        }
}

struct stream *ff_stream(const ff_group *group, int lane, int rank)
{
    return &group->nodes->streams[lane][rank];
}

/* The socket that leads to a rank, opened when something is first sent to it; -1: it cannot be reached. */
int ff_stream_to(ff_group *group, int lane, int rank)
{
    struct stream *stream = ff_stream(group, lane, rank);
    int out = atomic_load(&stream->out);
    if (out >= 0)
        return out;
    const struct nodes *nodes = group->nodes;
    int tag = nodes->mpi_ranks ? ff_mpi_tag() : -1;
    out = nodes->connect(nodes->self, rank, lane, tag);
    if (out <= 0)
        return -1;              /* Python returns 0 for an exception */
    if (tag >= 0 && !(stream->mpi_out = ff_mpi_out(nodes->mpi_ranks[rank], tag))) {
        close(out);
        return -1;
    }
    atomic_store(&stream->out, out);
    return out;
}

/* Send what is left of a head, and `bytes` of the `left` that follow it; how many of them were taken, or -1. */
long ff_stream_send(ff_group *group, struct stream *stream, const struct head *head, size_t *head_at,
                    const char *data, size_t bytes, size_t left)
{
    struct iovec parts[] = {{(char *)head + *head_at, HEAD - *head_at},
                            {(char *)data, bytes < MOST_BYTES ? bytes : MOST_BYTES}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
    pthread_mutex_lock(&stream->lock);
    ssize_t sent = atomic_load(&group->shared->broken) ? (errno = EAGAIN, -1)
                   : stream->mpi_out ? ff_mpi_send(stream->mpi_out, parts, 2)
                                     : sendmsg(atomic_load(&stream->out), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0) {
        bool later = errno == EAGAIN || errno == EINTR;
        pthread_mutex_unlock(&stream->lock);
        return later ? 0 : -1;
    }
    size_t of_head = (size_t)sent < parts[0].iov_len ? (size_t)sent : parts[0].iov_len;
    *head_at += of_head;
    stream->midway = (size_t)sent - of_head < left || *head_at < HEAD;
    pthread_mutex_unlock(&stream->lock);
    return sent - (ssize_t)of_head;
}

static size_t take_ahead(struct stream *stream, const struct iovec *part)
{
    size_t bytes = least(part->iov_len, stream->ahead_end - stream->ahead_at);
    copy(part->iov_base, stream->ahead + stream->ahead_at, bytes);
    stream->ahead_at += bytes;
    return bytes;
}

/* Fill a head and what follows it, with what was received ahead, or else what has come since. */
static ssize_t fill(struct stream *stream, struct iovec *parts)
{
    if (stream->ahead_at < stream->ahead_end)
        return (ssize_t)(take_ahead(stream, &parts[0]) + take_ahead(stream, &parts[1]));
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = stream->ahead ? 3 : 2};
    int in = atomic_load(&stream->in);
    ssize_t got = stream->mpi_in ? ff_mpi_receive(stream->mpi_in, in, parts, (int)message.msg_iovlen)
                                 : recvmsg(in, &message, MSG_DONTWAIT);
    ssize_t wanted = (ssize_t)(parts[0].iov_len + parts[1].iov_len);
    stream->ahead_at = 0;
    stream->ahead_end = got > wanted ? (size_t)(got - wanted) : 0;
    return got > wanted ? wanted : got;
}

/* Receive what is left of a head and of what follows it; bytes of the latter that came, or -1 where nothing more will
 * (errno 0 at the end of the stream). */
long ff_stream_receive(ff_group *group, struct stream *stream, struct head *head, size_t *head_at,
                       char *data, size_t bytes)
{
    struct iovec parts[] = {{(char *)head + *head_at, HEAD - *head_at}, {data, bytes}, {stream->ahead, FF_AHEAD_BYTES}};
    bool in_head = *head_at < HEAD;
    ssize_t got = fill(stream, parts);
    if (got <= 0) {
        errno = got ? errno : 0;
        return got && (errno == EAGAIN || errno == EINTR) ? 0 : -1;
    }
    size_t of_head = (size_t)got < parts[0].iov_len ? (size_t)got : parts[0].iov_len;
    *head_at += of_head;
    if (!in_head || *head_at < HEAD || (head->what != GAVE_UP && head->what != LEFT))
        return got - (ssize_t)of_head;
    if (head->what == GAVE_UP)
        ff_break(group, head->count);
    else
        atomic_store(&stream->left, true);
    errno = 0;
    return -1;
}

/* A rank takes nothing more. */
void ff_stream_ended(struct stream *stream)
{
    uint64_t never = 0;
    atomic_compare_exchange_strong(&stream->ended_ns, &never, ff_now_ns());
    atomic_store(&stream->ended_out, true);
}

/* Whether a rank has ended that has not opened a stream to this one: what it sent just before its end may still be on
 * its way through the handshake. */
bool ff_stream_never_came(const ff_group *group, int lane, int rank)
{
    bool gone = false;
    if (atomic_load(&ff_stream(group, lane, rank)->in) >= 0)
        return false;
    for (int other = 0; other < group->nodes->lanes; other++) {     /* this one may not be open either way */
        const struct stream *stream = ff_stream(group, other, rank);
        gone |= atomic_load(&stream->ended_out) && ff_now_ns() - atomic_load(&stream->ended_ns) > HANDSHAKE_NS;
    }
    return gone;
}

/* By errno. */
void ff_stream_failed(struct stream *stream)
{
    if (errno == ETIMEDOUT || errno == EHOSTUNREACH || errno == ENETUNREACH)
        atomic_store(&stream->silent, true);
}

/* How a rank has ended, by what any of its streams has told. */
int ff_stream_end(const ff_group *group, int rank)
{
    bool left = false, silent = false;
    for (int lane = 0; lane < group->nodes->lanes; lane++) {
        const struct stream *stream = ff_stream(group, lane, rank);
        left |= atomic_load(&stream->left);
        silent |= atomic_load(&stream->silent);
    }
    return left ? FF_LEFT : silent ? FF_CUT_OFF : FF_DIED;
}

/* What the others tell against the direction of their streams. */
void ff_streams_hear(ff_group *group)
{
    struct head head;
    for (int lane = 0; lane < group->nodes->lanes; lane++)
        for (int q = 0; q < group->nodes->ranks; q++) {
            struct stream *stream = ff_stream(group, lane, q);
            int out = atomic_load(&stream->out);
            if (out < 0 || atomic_load(&stream->ended_out))
                continue;
            ssize_t got = recv(out, &head, HEAD, MSG_DONTWAIT | MSG_PEEK);
            if (got < 0)
                ff_stream_failed(stream);
            if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR))
                ff_stream_ended(stream);
            if (got != HEAD)
                continue;
            ff_stream_ended(stream);
            if (head.what == GAVE_UP)
                ff_break(group, head.count);
            else if (head.what == LEFT)
                atomic_store(&stream->left, true);
        }
}

/* Nothing more comes from a rank, or goes to it, by errno: the error of whoever waits for it. Were it the others that
 * had lost a third, they have said so just before. */
int ff_stream_lost(ff_group *group, int lane, int rank, ff_report *report)
{
    struct stream *stream = ff_stream(group, lane, rank);
    ff_stream_failed(stream);
    for (int ms = 0; ms < GRACE_MS; ms++) {
        ff_streams_hear(group);
        if (ff_is_broken(group, report))
            return FF_BROKEN;
        if (ff_stream_end(group, rank) == FF_LEFT)
            break;
        usleep(1000);
    }
    ff_miss(report, rank);
    return ff_give_up(group, report, ff_stream_end(group, rank));
}

int ff_stream_unreachable(ff_group *group, int rank, ff_report *report)
{
    ff_miss(report, rank);
    return ff_give_up(group, report, FF_UNREACHABLE);
}

/* Between what was sent and what would be; in the middle of something, the stream ends there. */
static void tell(struct stream *stream, const struct head *head)
{
    int in = atomic_load(&stream->in), out = atomic_load(&stream->out);
    if (in >= 0)
        send(in, head, HEAD, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (out < 0)
        return;
    pthread_mutex_lock(&stream->lock);
    if (stream->mpi_out) {
        ff_mpi_end(stream->mpi_out, stream->midway ? NULL : head);
    } else {
        if (!stream->midway)
            send(out, head, HEAD, MSG_DONTWAIT | MSG_NOSIGNAL);
        shutdown(out, SHUT_WR);
    }
    pthread_mutex_unlock(&stream->lock);
}

/* Once; who opens a stream later is told then. */
static void tell_all(ff_group *group, struct head head)
{
    struct nodes *nodes = group->nodes;
    pthread_mutex_lock(&nodes->telling);
    bool first = !atomic_load(&nodes->tells);
    if (first) {
        *nodes->told = head;
        atomic_store(&nodes->tells, true);
    }
    pthread_mutex_unlock(&nodes->telling);
    for (int lane = 0; lane < nodes->lanes && first; lane++)
        for (int q = 0; nodes->streams[lane] && q < nodes->ranks; q++)
            tell(ff_stream(group, lane, q), &head);
}

/* That the group is broken. */
void ff_streams_tell_of(ff_group *group)
{
    if (group->nodes && !atomic_load(&group->nodes->tells))
        tell_all(group, (struct head){.what = GAVE_UP, .count = atomic_load(&group->shared->broken)});
}

/* After the threads of the group have ended. */
void ff_streams_close(ff_group *group)
{
    struct nodes *nodes = group->nodes;
    tell_all(group, (struct head){.what = LEFT});
    for (int lane = 0; lane < nodes->lanes; lane++) {
        for (int q = 0; nodes->streams[lane] && q < nodes->ranks; q++) {
            struct stream *stream = ff_stream(group, lane, q);
            char rest[HEAD * 2];
            int ends[] = {atomic_load(&stream->out), atomic_load(&stream->in)};
            while (ends[0] >= 0 && recv(ends[0], rest, sizeof rest, MSG_DONTWAIT) > 0)
                ;               /* what is left unread would have the kernel drop what was sent */
            if (stream->mpi_out) {
                ff_mpi_let_go(stream->mpi_out, ends[0]);
                ends[0] = -1;
            }
            if (stream->mpi_in)
                ff_mpi_close(stream->mpi_in);
            for (int i = 0; i < 2; i++)
                if (ends[i] >= 0)
                    close(ends[i]);
            free(stream->ahead);
            pthread_mutex_destroy(&stream->lock);
        }
        free(nodes->streams[lane]);
    }
    for (int q = 0; q < group->ranks; q++)
        close(group->peers[q].waker);
    free(nodes->mpi_ranks);
    free(nodes->node_of);
    free(nodes->place);
    free(nodes->members);
    free(nodes->begins);
    free(nodes->scratch);
    for (int way = 0; way < 2; way++) {
        free(nodes->turns[way]);
        free(nodes->places[way]);
    }
    free(nodes->pieces);
    free(nodes->polled);
    free(nodes->parts);
    free(nodes->told);
    pthread_mutex_destroy(&nodes->telling);
    free(nodes);
    group->nodes = NULL;
}
