/* Messages to and from ranks on other nodes: what rings.c does, through streams. */
#define _GNU_SOURCE
#include "messages.h"

#include <poll.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

enum { HEAD = sizeof(struct head) };
static const uint64_t LOOK_NS = 50 * 1000 * 1000;
static const size_t PIECE_BYTES = 1 << 20;

/* Send as much of a message as the stream takes; whether any was. */
bool ff_letter_push(ff_group *group, ff_message *message)
{
    struct stream *stream = ff_stream(group, FF_MESSAGES, message->peer);
    const struct head head = {.what = message->dtype, .root = message->tag, .bytes = message->bytes};
    size_t head_at = message->head_at, left = message->bytes - message->at;
    if (atomic_load(&stream->ended_out) || atomic_load(&group->shared->broken))
        return false;
    if (ff_stream_to(group, FF_MESSAGES, message->peer) < 0) {
        ff_stream_unreachable(group, message->peer, &message->report);
        return false;
    }
    long sent = ff_stream_send(group, stream, &head, &message->head_at, message->data + message->at, left, left);
    if (sent < 0) {
        ff_stream_failed(stream);
        ff_streams_hear(group);
        ff_stream_ended(stream);
        return false;
    }
    message->at += (uint64_t)sent;
    message->begun = message->head_at == HEAD;
    return sent > 0 || message->head_at > head_at;
}

/* Who waits for more finds out in messages.c. */
static bool ended(ff_group *group, struct stream *stream)
{
    ff_stream_failed(stream);
    ff_streams_hear(group);
    atomic_store(&stream->ended_in, true);
    return false;
}

/* Read on, if someone waits for a message of this peer. */
bool ff_letter_pull(ff_group *group, int peer)
{
    static _Thread_local char unwanted[1 << 16];
    struct messages *all = group->messages;
    struct coming *coming = &all->coming[peer];
    struct stream *stream = ff_stream(group, FF_MESSAGES, peer);
    size_t head_at = coming->head_at;
    if (atomic_load(&stream->in) < 0 || atomic_load(&stream->ended_in))
        return false;
    if (!coming->active) {
        if (!ff_anyone_listens(all, peer))
            return false;
        if (!stream->ahead && !stream->mpi_in)  /* small ones come many at a time; without memory for that, one by one */
            stream->ahead = malloc(FF_AHEAD_BYTES);
        if (ff_stream_receive(group, stream, &coming->head, &coming->head_at, NULL, 0) < 0)
            return ended(group, stream);
        if (coming->head_at < HEAD)
            return coming->head_at > head_at;
        const struct head head = coming->head;
        if (!ff_coming_begin(group, peer, head.bytes, head.root, head.what))
            return false;
        coming->head_at = HEAD;
    }
    size_t left = coming->bytes - coming->at;
    char *to = ff_coming_to(coming);
    size_t most = to ? PIECE_BYTES : sizeof unwanted;
    long got = !left ? 0
                     : ff_stream_receive(group, stream, &coming->head, &coming->head_at, to ? to + coming->at : unwanted,
                                         left < most ? left : most);
    if (got < 0)
        return ended(group, stream);
    coming->at += (uint64_t)got;
    bool moved = got > 0 || head_at < HEAD;
    if (coming->at == coming->bytes) {
        ff_coming_end(all, coming);
        coming->head_at = 0;
    }
    return moved;
}

/* A stream to whoever is waited for tells of its end, whether or not it has opened one. */
static void reach_senders(ff_group *group)
{
    for (const ff_message *message = group->messages->receives; message; message = message->next)
        if (message->peer >= 0 && ff_local(group, message->peer) < 0 &&
            ff_stream_to(group, FF_MESSAGES, message->peer) < 0) {
            ff_report report = {0};
            ff_stream_unreachable(group, message->peer, &report);
            return;
        }
}

/* Sleep until something may have changed: a bell rings, or a stream can go on. The lock is held outside. */
void ff_letters_sleep(ff_group *group, uint32_t seen)
{
    struct messages *all = group->messages;
    struct bell *bell = &group->bells[group->rank];
    struct pollfd polled[2 * ff_size(group) + 1];
    int count = 0, waker = group->peers[group->rank].waker;
    uint64_t most_ns = LOOK_NS;
    bool told = false;
    reach_senders(group);
    polled[count++] = (struct pollfd){.fd = waker, .events = POLLIN};
    for (int q = 0; q < ff_size(group); q++) {
        if (ff_local(group, q) >= 0)
            continue;
        const struct stream *stream = ff_stream(group, FF_MESSAGES, q);
        int in = atomic_load(&stream->in), out = atomic_load(&stream->out);
        bool comes = in >= 0 && !atomic_load(&stream->ended_in) && (all->coming[q].active || ff_anyone_listens(all, q));
        bool goes = out >= 0 && all->sends[q];
        if ((comes && stream->mpi_in) || (goes && stream->mpi_out))
            most_ns = ff_mpi_nap_ns(all->naps);
        if (comes && !stream->mpi_in)
            polled[count++] = (struct pollfd){.fd = in, .events = POLLIN};
        if (out >= 0 && !atomic_load(&stream->ended_out))
            polled[count++] = (struct pollfd){.fd = out, .events = TOLD | (goes && !stream->mpi_out ? POLLOUT : 0)};
    }
    pthread_mutex_unlock(&all->lock);
    atomic_fetch_add(&bell->polling, 1);
    const struct timespec time = {.tv_nsec = (long)most_ns};
    if (atomic_load(&bell->rung) == seen && ppoll(polled, (nfds_t)count, &time, NULL) > 0)
        for (int i = 0; i < count; i++)
            told |= tells(&polled[i]);
    if (told)
        ff_streams_hear(group);
    atomic_fetch_sub(&bell->polling, 1);
    uint64_t woken;
    if (polled[0].revents && read(waker, &woken, sizeof woken) < 0)
        woken = 0;              /* another thread has read it */
    pthread_mutex_lock(&all->lock);
}
