/* Moving messages through the rings, as far as there is room and data. */
#include "messages.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* What precedes a message. Messages are padded to its size, so that it never wraps. */
struct ring_head {
    uint64_t bytes;
    int32_t tag;
    uint32_t dtype;
    uint64_t place, address;    /* of an offered message, as in a post */
};

enum { HEAD = sizeof(struct ring_head) };
/* Told to the reader before the rest is written, so that both copy at once. */
static const uint64_t PIECE_BYTES = 64 * 1024;
/* Of an offered message: other messages may move in between. */
static const uint64_t READ_PIECE_BYTES = 1024 * 1024;
/* From where one copy by the kernel costs about as much as two of our own that overlap, where both ranks have a
 * core to themselves, and less where they share one; and the sender's is free. */
#ifdef FF_READ_ALL
static const uint64_t READ_BYTES = FF_READ_ALL;     /* for tests */
#else
static const uint64_t READ_BYTES = 4 << 20;
#endif

static uint64_t padded(uint64_t bytes)
{
    return (bytes + HEAD - 1) / HEAD * HEAD;
}

/* Ranks of rings are those of the node. */
static struct ring *ring_of(const ff_group *group, int from, int to)
{
    return &group->rings[from * group->ranks + to];
}

static char *data_of(const ff_group *group, int from, int to)
{
    return group->ring_data + (size_t)(from * group->ranks + to) * group->ring_bytes;
}

void ff_ring_bell(ff_group *group, int local)
{
    struct bell *bell = &group->bells[local];
    atomic_fetch_add(&bell->rung, 1);
    if (atomic_load(&bell->sleepers))
        ff_futex_wake(&bell->rung);
    if (atomic_load(&bell->polling)) {
        const uint64_t one = 1;
        if (write(group->peers[local].waker, &one, sizeof one) < 0)
            return;             /* it has been woken so often that it need not be once more */
    }
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

/* The head of a message. One that fits into the ring is never offered: it leaves without its reader. */
static struct ring_head head_of(const ff_group *group, ff_message *message)
{
    struct ring_head head = {.bytes = message->bytes, .tag = message->tag, .dtype = message->dtype};
    if (message->bytes <= group->ring_bytes)
        return head;
    head.place = ff_place(group, message->data, message->bytes);
    if (!head.place && group->reaches && message->bytes >= READ_BYTES)
        head.address = (uint64_t)(uintptr_t)message->data;
    message->offered = head.place || head.address;
    return head;
}

/* Write as much of a message as there is room for; whether any was. */
static bool push(ff_group *group, ff_message *message)
{
    int local = ff_local(group, message->peer);
    struct ring *ring = ring_of(group, group->rank, local);
    char *data = data_of(group, group->rank, local);
    uint64_t written = atomic_load_explicit(&ring->written, memory_order_relaxed);
    uint64_t taken = atomic_load_explicit(&ring->taken, memory_order_acquire);
    uint64_t room = group->ring_bytes - (written - taken), before = written;
    if (!message->begun) {
        if (room < HEAD)
            return false;
        struct ring_head head = head_of(group, message);
        put(data, group->ring_bytes, written, (const char *)&head, HEAD);
        written += HEAD;
        room -= HEAD;
        message->begun = true;
        message->mark = written;
        message->at = message->offered ? message->bytes : 0;
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
    ff_ring_bell(group, local);
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

bool ff_anyone_listens(const struct messages *all, int peer)
{
    for (const ff_message *message = all->receives; message; message = message->next)
        if (message->peer == peer || message->peer < 0)
            return true;
    return false;
}

static struct stray *new_stray(struct messages *all, int peer, uint64_t bytes, int32_t tag, uint32_t dtype)
{
    struct stray *stray = NULL, **end = &all->strays;
    if (bytes > all->stray_limit - all->stray_bytes || !(stray = calloc(1, sizeof *stray)) ||
        !(stray->data = malloc(bytes ? bytes : 1))) {
        free(stray);
        return NULL;
    }
    stray->peer = peer;
    stray->tag = tag;
    stray->dtype = dtype;
    stray->bytes = bytes;
    all->stray_bytes += bytes;
    while (*end)
        end = &(*end)->next;
    return *end = stray;
}

static void told(ff_message *message, int peer, uint32_t dtype, uint64_t bytes)
{
    message->peer = peer;
    message->report.other = peer;
    message->report.other_dtype = dtype;
    message->report.other_count = bytes;
}

/* Of a message whose sender has been told. */
static int verdict(const ff_message *message)
{
    uint64_t bytes = message->report.other_count;
    if (message->report.other_dtype != message->dtype)
        return FF_MISMATCH;
    return bytes > message->bytes ? FF_TOO_LONG : bytes < message->bytes ? FF_TOO_SHORT : FF_OK;
}

static void hand_over(struct messages *all, struct stray *stray)
{
    struct stray **at = &all->strays;
    ff_message *taker = stray->taker;
    if (verdict(taker) == FF_OK && stray->bytes)
        memcpy(taker->data, stray->data, stray->bytes);
    ff_messages_settle(all, taker, verdict(taker));
    while (*at != stray)
        at = &(*at)->next;
    *at = stray->next;
    all->stray_bytes -= stray->bytes;
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
        told(message, stray->peer, stray->dtype, stray->bytes);
        if (stray->complete)
            hand_over(all, stray);
        return true;
    }
    return false;
}

bool ff_coming_begin(ff_group *group, int peer, uint64_t bytes, int32_t tag, uint32_t dtype)
{
    struct messages *all = group->messages;
    struct coming *coming = &all->coming[peer];
    *coming = (struct coming){.active = true, .bytes = bytes};
    coming->message = unlink_receiver(all, peer, tag);
    if (coming->message)
        told(coming->message, peer, dtype, bytes);
    else if (!(coming->stray = new_stray(all, peer, bytes, tag, dtype))) {
        ff_report report = {0};
        ff_miss(&report, peer);
        ff_give_up(group, &report, FF_NO_MEMORY);   /* it could only wait for a receiver that may never come */
        return coming->active = false;
    }
    return true;
}

/* Read the head of the next message, if someone waits for one of this peer. */
static bool begin(ff_group *group, int peer, const char *data, uint64_t taken)
{
    struct ring_head head;
    if (!ff_anyone_listens(group->messages, peer))
        return false;
    get(data, group->ring_bytes, taken, (char *)&head, HEAD);
    if (!ff_coming_begin(group, peer, head.bytes, head.tag, head.dtype))
        return false;
    group->messages->coming[peer].view = ff_view(group, ff_local(group, peer), head.place, head.address);
    return true;
}

void ff_coming_end(struct messages *all, struct coming *coming)
{
    ff_message *message = coming->message;
    coming->active = false;
    coming->message = NULL;
    if (message) {
        ff_messages_settle(all, message, verdict(message));
    } else if (coming->stray) {
        coming->stray->complete = true;
        if (coming->stray->taker)
            hand_over(all, coming->stray);
    }
}

char *ff_coming_to(const struct coming *coming)
{
    if (coming->message)
        return verdict(coming->message) == FF_OK ? coming->message->data : NULL;
    return coming->stray ? coming->stray->data : NULL;
}

/* Read a piece of an offered message where it lies; the head stays in the ring until all has been read. */
static bool read_piece(ff_group *group, int peer)
{
    struct coming *coming = &group->messages->coming[peer];
    int local = ff_local(group, peer);
    struct ring *ring = ring_of(group, local, group->rank);
    uint64_t left = coming->bytes - coming->at, bytes = left < READ_PIECE_BYTES ? left : READ_PIECE_BYTES;
    char *to = ff_coming_to(coming);
    if (!to)
        bytes = left;
    else if (ff_read_from(group, &coming->view, coming->at, to + coming->at, bytes)) {
        ff_report report = {0};
        ff_miss(&report, peer);
        ff_give_up(group, &report, ff_is_ending(group, local) ? FF_DIED : FF_UNREADABLE);
        return false;
    }
    coming->at += bytes;
    if (coming->at < coming->bytes)
        return true;
    if (atomic_load(&group->shared->broken))
        return false;           /* the sender may have given up, and let the message go meanwhile */
    atomic_fetch_add_explicit(&ring->taken, HEAD, memory_order_release);
    ff_ring_bell(group, local);
    ff_coming_end(group->messages, coming);
    return true;
}

static bool pull(ff_group *group, int peer)
{
    struct messages *all = group->messages;
    struct coming *coming = &all->coming[peer];
    int local = ff_local(group, peer);
    struct ring *ring = ring_of(group, local, group->rank);
    const char *data = data_of(group, local, group->rank);
    uint64_t taken = atomic_load_explicit(&ring->taken, memory_order_relaxed);
    uint64_t there = atomic_load_explicit(&ring->written, memory_order_acquire) - taken;
    uint64_t before = taken;
    if (!coming->active) {
        if (!there || !begin(group, peer, data, taken))
            return false;
        if (!ff_sees(&coming->view)) {
            taken += HEAD;
            there -= HEAD;
        }
    }
    if (ff_sees(&coming->view))
        return read_piece(group, peer);
    uint64_t left = coming->bytes - coming->at, bytes = left < there ? left : there;
    char *to = ff_coming_to(coming);
    if (to && bytes)
        get(data, group->ring_bytes, taken, to + coming->at, bytes);
    coming->at += bytes;
    taken += padded(bytes);
    if (taken != before) {
        atomic_store_explicit(&ring->taken, taken, memory_order_release);
        ff_ring_bell(group, local);
    }
    if (coming->at == coming->bytes)
        ff_coming_end(all, coming);
    return taken != before;
}

/* What has left: a message that is all in the ring, or offers that were read. */
static void settle_sends(ff_group *group, int peer)
{
    struct messages *all = group->messages;
    ff_message *sent = all->sends[peer];
    if (sent && sent->begun && sent->at == sent->bytes) {
        all->sends[peer] = sent->next;
        sent->next = NULL;
        if (sent->offered)
            ff_messages_append(&all->offers[peer], sent);
        else
            ff_messages_settle(all, sent, FF_OK);
    }
    if (!all->offers[peer])
        return;
    struct ring *ring = ring_of(group, group->rank, ff_local(group, peer));
    while ((sent = all->offers[peer]) &&
           atomic_load_explicit(&ring->taken, memory_order_acquire) >= sent->mark) {
        all->offers[peer] = sent->next;
        sent->next = NULL;
        ff_messages_settle(all, sent, FF_OK);
    }
}

bool ff_messages_move(ff_group *group)
{
    struct messages *all = group->messages;
    bool moved = false;
    for (int q = 0; q < ff_size(group); q++) {
        bool near = ff_local(group, q) >= 0;
        if (all->sends[q])
            moved |= near ? push(group, all->sends[q]) : ff_letter_push(group, all->sends[q]);
        if (all->sends[q] || all->offers[q])
            settle_sends(group, q);
        if (all->receives || all->coming[q].active)
            moved |= near ? pull(group, q) : ff_letter_pull(group, q);
    }
    return moved;
}
