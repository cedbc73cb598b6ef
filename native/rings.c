/* Moving messages through the rings, as far as there is room and data. */
#include "messages.h"

#include <stdlib.h>
#include <string.h>

/* What precedes a message. Messages are padded to its size, so that it never wraps. */
struct head {
    uint64_t bytes;
    int32_t tag;
    uint32_t unused[5];
};

enum { HEAD = sizeof(struct head) };
/* Told to the reader before the rest is written, so that both copy at once. */
static const uint64_t PIECE_BYTES = 64 * 1024;

static uint64_t padded(uint64_t bytes)
{
    return (bytes + HEAD - 1) / HEAD * HEAD;
}

static struct ring *ring_of(const ff_group *group, int from, int to)
{
    return &group->rings[from * group->ranks + to];
}

static char *data_of(const ff_group *group, int from, int to)
{
    return group->ring_data + (size_t)(from * group->ranks + to) * group->ring_bytes;
}

static void ring_bell(ff_group *group, int rank)
{
    struct bell *bell = &group->bells[rank];
    atomic_fetch_add(&bell->rung, 1);
    if (atomic_load(&bell->sleepers))
        ff_futex_wake(&bell->rung);
}

static void put(char *ring, uint64_t ring_bytes, uint64_t at, const char *from, uint64_t bytes)
{
    uint64_t start = at % ring_bytes, first = bytes < ring_bytes - start ? bytes : ring_bytes - start;
    memcpy(ring + start, from, first);
    memcpy(ring, from + first, bytes - first);
}

static void get(const char *ring, uint64_t ring_bytes, uint64_t at, char *to, uint64_t bytes)
{
    uint64_t start = at % ring_bytes, first = bytes < ring_bytes - start ? bytes : ring_bytes - start;
    memcpy(to, ring + start, first);
    memcpy(to + first, ring, bytes - first);
}

/* Write as much of a message as there is room for; whether any was. */
static bool push(ff_group *group, ff_message *message)
{
    struct ring *ring = ring_of(group, group->rank, message->peer);
    char *data = data_of(group, group->rank, message->peer);
    uint64_t written = atomic_load_explicit(&ring->written, memory_order_relaxed);
    uint64_t taken = atomic_load_explicit(&ring->taken, memory_order_acquire);
    uint64_t room = group->ring_bytes - (written - taken), before = written;
    if (!message->begun) {
        struct head head = {.bytes = message->bytes, .tag = message->tag};
        if (room < HEAD)
            return false;
        put(data, group->ring_bytes, written, (const char *)&head, HEAD);
        written += HEAD;
        room -= HEAD;
        message->begun = true;
    }
    uint64_t left = message->bytes - message->at;
    uint64_t bytes = left < room ? left : room;
    if (bytes > PIECE_BYTES)
        bytes = PIECE_BYTES;
    if (bytes)
        put(data, group->ring_bytes, written, message->data + message->at, bytes);
    message->at += bytes;
    written += padded(bytes);
    if (written == before)
        return false;
    atomic_store_explicit(&ring->written, written, memory_order_release);
    ring_bell(group, message->peer);
    return true;
}

static bool suits(const ff_message *message, int peer, int32_t tag)
{
    return (message->peer == peer || message->peer < 0) && message->tag == tag;
}

static ff_message *unlink_receiver(struct messages *all, int peer, int32_t tag)
{
    for (ff_message **at = &all->receives; *at; at = &(*at)->next) {
        ff_message *message = *at;
        if (suits(message, peer, tag)) {
            *at = message->next;
            message->next = NULL;
            return message;
        }
    }
    return NULL;
}

static bool anyone_listens(const struct messages *all, int peer)
{
    for (const ff_message *message = all->receives; message; message = message->next)
        if (message->peer == peer || message->peer < 0)
            return true;
    return false;
}

static struct stray *new_stray(struct messages *all, int peer, const struct head *head)
{
    struct stray *stray = calloc(1, sizeof *stray), **end = &all->strays;
    if (!stray || !(stray->data = malloc(head->bytes ? head->bytes : 1))) {
        free(stray);
        return NULL;
    }
    stray->peer = peer;
    stray->tag = head->tag;
    stray->bytes = head->bytes;
    while (*end)
        end = &(*end)->next;
    return *end = stray;
}

static void told(ff_message *message, int peer, uint64_t bytes)
{
    message->peer = peer;
    message->report.other = peer;
    message->report.other_count = bytes;
}

static int verdict(const ff_message *message, uint64_t bytes)
{
    return bytes > message->bytes ? FF_TOO_LONG : bytes < message->bytes ? FF_TOO_SHORT : FF_OK;
}

static void hand_over(struct messages *all, struct stray *stray)
{
    struct stray **at = &all->strays;
    ff_message *taker = stray->taker;
    if (verdict(taker, stray->bytes) == FF_OK && stray->bytes)
        memcpy(taker->data, stray->data, stray->bytes);
    ff_messages_settle(all, taker, verdict(taker, stray->bytes));
    while (*at != stray)
        at = &(*at)->next;
    *at = stray->next;
    free(stray->data);
    free(stray);
}

bool ff_messages_take_stray(ff_group *group, ff_message *message)
{
    struct messages *all = group->messages;
    for (struct stray *stray = all->strays; stray; stray = stray->next) {
        if (stray->taker || !suits(message, stray->peer, stray->tag))
            continue;
        stray->taker = message;
        told(message, stray->peer, stray->bytes);
        if (stray->complete)
            hand_over(all, stray);
        return true;
    }
    return false;
}

/* Read the head of the next message, if someone waits for one of this peer. */
static bool begin(ff_group *group, int peer, const char *data, uint64_t taken)
{
    struct messages *all = group->messages;
    struct coming *coming = &all->coming[peer];
    struct head head;
    if (!anyone_listens(all, peer))
        return false;
    get(data, group->ring_bytes, taken, (char *)&head, HEAD);
    *coming = (struct coming){.active = true, .bytes = head.bytes};
    coming->message = unlink_receiver(all, peer, head.tag);
    if (coming->message)
        told(coming->message, peer, head.bytes);
    else if (!(coming->stray = new_stray(all, peer, &head)))
        return coming->active = false;
    return true;
}

static void end(struct messages *all, struct coming *coming)
{
    coming->active = false;
    if (coming->message) {
        ff_messages_settle(all, coming->message, verdict(coming->message, coming->bytes));
    } else if (coming->stray) {
        coming->stray->complete = true;
        if (coming->stray->taker)
            hand_over(all, coming->stray);
    }
}

/* Where the next bytes go, NULL where they are not wanted. */
static char *destination(const struct coming *coming)
{
    if (coming->message)
        return verdict(coming->message, coming->bytes) == FF_OK ? coming->message->data : NULL;
    return coming->stray ? coming->stray->data : NULL;
}

static bool pull(ff_group *group, int peer)
{
    struct messages *all = group->messages;
    struct coming *coming = &all->coming[peer];
    struct ring *ring = ring_of(group, peer, group->rank);
    const char *data = data_of(group, peer, group->rank);
    uint64_t taken = atomic_load_explicit(&ring->taken, memory_order_relaxed);
    uint64_t there = atomic_load_explicit(&ring->written, memory_order_acquire) - taken;
    uint64_t before = taken;
    if (!coming->active) {
        if (!there || !begin(group, peer, data, taken))
            return false;
        taken += HEAD;
        there -= HEAD;
    }
    uint64_t left = coming->bytes - coming->at, bytes = left < there ? left : there;
    char *to = destination(coming);
    if (to && bytes)
        get(data, group->ring_bytes, taken, to + coming->at, bytes);
    coming->at += bytes;
    taken += padded(bytes);
    if (taken != before) {
        atomic_store_explicit(&ring->taken, taken, memory_order_release);
        ring_bell(group, peer);
    }
    if (coming->at == coming->bytes)
        end(all, coming);
    return taken != before;
}

bool ff_messages_move(ff_group *group)
{
    struct messages *all = group->messages;
    bool moved = false;
    for (int q = 0; q < group->ranks; q++) {
        ff_message *message = all->sends[q];
        if (message && push(group, message)) {
            moved = true;
            if (message->at == message->bytes) {
                all->sends[q] = message->next;
                message->next = NULL;
                ff_messages_settle(all, message, FF_OK);
            }
        }
        if (all->receives || all->coming[q].active)
            moved |= pull(group, q);
    }
    return moved;
}
