/* Messages: through one ring per ordered pair of ranks, matched by tag.
 *
 *     rank 0                      ring 0 -> 1                      rank 1
 *     send A (tag 1)   ->   | head A | A A A | head B | B |   ->   receive tag 2: B; A waits as a stray
 *     send B (tag 2)                                              receive tag 1: A
 *
 * Of a message that does not fit into the ring only the head is written, if the reader can reach the rest where
 * it lies (reach.c); it takes the head out when it has read it all.
 *
 * Whoever waits moves all messages of the rank, in both directions; while nobody waits, a thread does.
 */
#define _GNU_SOURCE
#include "messages.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const uint64_t LOOK_NS = 50 * 1000 * 1000;
static ff_message gone = {.sends = true, .peer = -1, .report = {.other = -1}, .done = 1};

int ff_messages_open(ff_group *group)
{
    struct messages *all = calloc(1, sizeof *all);
    if (!all)
        return -1;
    pthread_mutex_init(&all->lock, NULL);
    ff_condition(&all->work);
#ifdef FF_STRAY_BYTES
    all->stray_limit = FF_STRAY_BYTES;      /* for tests */
#else
    all->stray_limit = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE) / 4;
#endif
    group->messages = all;
    return 0;
}

void ff_messages_settle(struct messages *all, ff_message *message, int status)
{
    message->report.status = (uint32_t)status;
    all->pending--;
    if (message->forgotten)
        free(message);
    else
        atomic_store_explicit(&message->done, 1, memory_order_release);
}

static void unlink_from(ff_message **list, ff_message *message)
{
    while (*list && *list != message)
        list = &(*list)->next;
    if (!*list)
        return;
    *list = message->next;
    message->next = NULL;
}

void ff_messages_append(ff_message **list, ff_message *message)
{
    while (*list)
        list = &(*list)->next;
    *list = message;
}

/* Take a message that will not come to its end out of all lists. */
static void drop(ff_group *group, ff_message *message, int status)
{
    struct messages *all = group->messages;
    if (message->sends) {
        unlink_from(&all->sends[message->peer], message);
        unlink_from(&all->offers[message->peer], message);
    } else {
        unlink_from(&all->receives, message);
    }
    for (int q = 0; q < ff_size(group); q++)
        if (all->coming[q].message == message)
            all->coming[q].message = NULL;
    for (struct stray *stray = all->strays; stray; stray = stray->next)
        if (stray->taker == message)
            stray->taker = NULL;
    ff_messages_settle(all, message, status);
}

/* Whether nothing more goes to a rank, or comes from it. */
static bool has_gone(ff_group *group, int rank, bool sends)
{
    int local = ff_local(group, rank);
    if (local < 0) {
        const struct stream *stream = ff_stream(group, FF_MESSAGES, rank);
        return sends ? atomic_load(&stream->ended_out)
                     : atomic_load(&stream->ended_in) || ff_stream_never_came(group, FF_MESSAGES, rank);
    }
    return ff_has_ended(group, local) || atomic_load(&group->bells[local].left);
}

/* FF_OK while the message may still come to its end. */
static int outlook(ff_group *group, ff_message *message)
{
    ff_report *report = &message->report;
    if (ff_is_broken(group, report))
        return FF_BROKEN;
    int gone = 0, end = FF_DIED;
    for (int q = 0; q < ff_size(group); q++)
        if ((message->peer < 0 ? q != ff_own(group) : q == message->peer) && has_gone(group, q, message->sends)) {
            ff_miss(report, q), gone++;
            end = ff_local(group, q) < 0 ? ff_stream_end(group, q) : FF_DIED;
        }
    if (gone == (message->peer < 0 ? ff_size(group) - 1 : 1))
        return ff_give_up(group, report, end);
    report->missing_count = 0;
    if (ff_now_ns() < message->deadline_ns)
        return FF_OK;
    if (message->peer >= 0)
        ff_miss(report, message->peer);
    return ff_give_up(group, report, FF_TIMEOUT);
}

static void drop_if_hopeless(ff_group *group, ff_message *message)
{
    int status = message ? outlook(group, message) : FF_OK;
    if (status)
        drop(group, message, status);
}

static void drop_hopeless_of(ff_group *group, ff_message *first)
{
    for (ff_message *next, *message = first; message; message = next) {
        next = message->next;
        drop_if_hopeless(group, message);
    }
}

static void drop_hopeless(ff_group *group)
{
    struct messages *all = group->messages;
    drop_hopeless_of(group, all->receives);
    for (int q = 0; q < ff_size(group); q++) {
        drop_hopeless_of(group, all->sends[q]);
        drop_hopeless_of(group, all->offers[q]);
        if (all->coming[q].active)      /* a part of it has come */
            drop_if_hopeless(group, all->coming[q].message);
    }
    for (const struct stray *stray = all->strays; stray; stray = stray->next)
        drop_if_hopeless(group, stray->taker);
}

/* One look at the rings, then sleep until something may have changed. The lock is held outside. */
static void sleep_on_bell(ff_group *group, uint32_t seen)
{
    struct bell *bell = &group->bells[group->rank];
    struct messages *all = group->messages;
    if (group->nodes) {
        ff_letters_sleep(group, seen);
    } else {
        pthread_mutex_unlock(&all->lock);
        atomic_fetch_add(&bell->sleepers, 1);
        if (atomic_load(&bell->rung) == seen)
            ff_futex_wait(&bell->rung, seen, LOOK_NS);
        atomic_fetch_sub(&bell->sleepers, 1);
        pthread_mutex_lock(&all->lock);
    }
    all->naps++;
    if (ff_messages_move(group))
        all->naps = 0;
    else
        drop_hopeless(group);
}

static void *thread_main(void *argument)
{
    ff_group *group = argument;
    struct messages *all = group->messages;
    pthread_mutex_lock(&all->lock);
    while (!all->stopping) {
        if (!all->pending || all->waiters) {
            if (!ff_nap(&all->work, &all->lock, all->posted_ns)) {
                all->thread_sleeps = true;
                pthread_cond_wait(&all->work, &all->lock);
                all->thread_sleeps = false;
            }
            continue;
        }
        uint32_t seen = atomic_load(&group->bells[group->rank].rung);
        if (!ff_messages_move(group))
            sleep_on_bell(group, seen);
    }
    pthread_mutex_unlock(&all->lock);
    return NULL;
}

static void start_thread(ff_group *group)
{
    sigset_t every, before;
    sigfillset(&every);
    pthread_sigmask(SIG_SETMASK, &every, &before);
    group->messages->has_thread =
        pthread_create(&group->messages->thread, NULL, thread_main, group) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static ff_message *post(ff_group *group, ff_message message, double timeout_s)
{
    struct messages *all = group->messages;
    ff_message *own = malloc(sizeof *own);
    if (!own)
        return NULL;
    *own = message;
    own->report.other = -1;
    own->deadline_ns = ff_deadline_ns(timeout_s);
    pthread_mutex_lock(&all->lock);
    own->report.sequence = all->posted++;
    all->pending++;
    all->posted_ns = ff_now_ns();
    if (own->sends)
        ff_messages_append(&all->sends[own->peer], own);
    else if (!ff_messages_take_stray(group, own))
        ff_messages_append(&all->receives, own);
    ff_messages_move(group);
    if (!atomic_load(&own->done)) {
        if (!all->has_thread)
            start_thread(group);
        else if (all->thread_sleeps && !all->waiters)
            pthread_cond_signal(&all->work);
    } else if (own->sends && !own->report.status) {
        free(own);
        own = &gone;
    }
    pthread_mutex_unlock(&all->lock);
    return own;
}

ff_message *ff_gone(void)
{
    return &gone;
}

ff_message *ff_send(ff_group *group, int peer, int32_t tag, uint32_t dtype, const void *data,
                    uint64_t bytes, double timeout_s)
{
    ff_message message = {.sends = true, .peer = peer, .tag = tag, .dtype = dtype, .data = (char *)data,
                          .bytes = bytes};
    return post(group, message, timeout_s);
}

ff_message *ff_receive(ff_group *group, int peer, int32_t tag, uint32_t dtype, void *data,
                       uint64_t bytes, double timeout_s)
{
    ff_message message = {.peer = peer, .tag = tag, .dtype = dtype, .data = data, .bytes = bytes};
    return post(group, message, timeout_s);
}

int ff_message_done(ff_group *group, ff_message *message)
{
    struct messages *all = group->messages;
    if (!atomic_load_explicit(&message->done, memory_order_acquire)) {
        pthread_mutex_lock(&all->lock);
        ff_messages_move(group);
        pthread_mutex_unlock(&all->lock);
    }
    return (int)atomic_load_explicit(&message->done, memory_order_acquire);
}

/* The lock is held. Spins and yields let it go, so that another thread may post. */
static void wait_until_done(ff_group *group, ff_message *message, uint64_t deadline_ns)
{
    struct messages *all = group->messages;
    const struct patience fresh = ff_patience(group, UINT64_MAX, false);
    struct patience patience = fresh;
    while (!atomic_load(&message->done)) {
        uint32_t seen = atomic_load(&group->bells[group->rank].rung);
        if (ff_messages_move(group)) {
            patience = fresh;
            continue;
        }
        pthread_mutex_unlock(&all->lock);
        bool awake = ff_bide(&patience);
        pthread_mutex_lock(&all->lock);
        if (!awake) {
            sleep_on_bell(group, seen);
            if (ff_now_ns() >= deadline_ns)
                return;
        }
    }
}

int ff_message_wait(ff_group *group, ff_message *message, double timeout_s, ff_report *report)
{
    struct messages *all = group->messages;
    if (!atomic_load_explicit(&message->done, memory_order_acquire)) {
        pthread_mutex_lock(&all->lock);
        all->waiters++;
        wait_until_done(group, message, ff_deadline_ns(timeout_s));
        all->waiters--;
        if (all->pending && all->thread_sleeps && !all->waiters)
            pthread_cond_signal(&all->work);
        pthread_mutex_unlock(&all->lock);
    }
    if (!atomic_load_explicit(&message->done, memory_order_acquire)) {
        if (message->peer >= 0)
            ff_miss(report, message->peer);
        return (int)(report->status = FF_TIMEOUT);
    }
    *report = message->report;
    return (int)report->status;
}

int ff_message_peer(const ff_message *message)
{
    return message->peer;
}

void ff_message_free(ff_group *group, ff_message *message)
{
    struct messages *all = group->messages;
    pthread_mutex_lock(&all->lock);
    if (!atomic_load(&message->done))
        message->forgotten = true;
    else if (message != &gone)
        free(message);
    pthread_mutex_unlock(&all->lock);
}

void ff_messages_close(ff_group *group)
{
    struct messages *all = group->messages;
    pthread_mutex_lock(&all->lock);
    all->stopping = true;
    if (all->pending) {
        ff_report nobody = {0};
        ff_give_up(group, &nobody, FF_CLOSED);
        drop_hopeless(group);
    }
    pthread_cond_broadcast(&all->work);
    ff_ring_bell(group, group->rank);
    pthread_mutex_unlock(&all->lock);
    if (all->has_thread)
        pthread_join(all->thread, NULL);
    while (all->strays) {
        struct stray *stray = all->strays;
        all->strays = stray->next;
        free(stray->data);
        free(stray);
    }
    pthread_cond_destroy(&all->work);
    pthread_mutex_destroy(&all->lock);
    free(all);
}
