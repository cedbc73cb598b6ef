/* Collectives of a group run one after the other: in the thread that waits for them, or, while nobody
 * waits, in a thread of the group.
 *
 *     post A  post B  compute ...  wait A            the group's thread runs A, then B
 *     post A  wait A                                 the caller mostly gets there first, and runs A itself
 */
#define _GNU_SOURCE
#include "internal.h"

#include <signal.h>
#include <stdlib.h>
#include <time.h>

struct ff_op {
    ff_call call;
    ff_report report;
    _Atomic uint32_t done;
    bool forgotten;             /* freed by its owner before it was done */
    struct ff_op *next;
};

int ff_queue_open(ff_group *group)
{
    pthread_mutex_init(&group->lock, NULL);
    ff_condition(&group->work);
    ff_condition(&group->done);
    return 0;
}

static int run_call(ff_group *group, const ff_call *call, ff_report *report, bool background)
{
    uint64_t now_ns = ff_now_ns();
    struct run run = {
        .group = group,
        .call = call,
        .report = report,
        .arrived_ns = now_ns,
        .patience = ff_patience(group, ff_deadline_after(now_ns, call->timeout_s), background),
    };
    return ff_execute(&run);
}

static void finish(ff_op *op)
{
    if (op->forgotten)
        free(op);
    else
        atomic_store_explicit(&op->done, 1, memory_order_release);
}

/* Run the first of the queue. The lock is held on entry and on return. */
static void run_first(ff_group *group, bool background)
{
    ff_op *op = group->first;
    group->first = op->next;
    if (!group->first)
        group->last = NULL;
    group->busy = true;
    pthread_mutex_unlock(&group->lock);
    run_call(group, &op->call, &op->report, background);
    pthread_mutex_lock(&group->lock);
    group->busy = false;
    finish(op);
    if (group->waiters)
        pthread_cond_broadcast(&group->done);
}

static void *thread_main(void *argument)
{
    ff_group *group = argument;
    pthread_mutex_lock(&group->lock);
    while (!group->stopping) {
        if (group->first && !group->busy) {
            run_first(group, true);
        } else if (!ff_nap(&group->work, &group->lock, group->posted_ns)) {
            group->thread_sleeps = true;
            pthread_cond_wait(&group->work, &group->lock);
            group->thread_sleeps = false;
        }
    }
    pthread_mutex_unlock(&group->lock);
    return NULL;
}

static void wake_thread(ff_group *group)
{
    if (group->first && group->thread_sleeps && !group->busy)
        pthread_cond_signal(&group->work);
}

/* Python's signal handlers belong to its main thread, so this one takes no signals. */
static void start_thread(ff_group *group)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    group->has_thread = pthread_create(&group->thread, NULL, thread_main, group) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static int run_now(ff_group *group, const ff_call *call, ff_report *report)
{
    pthread_mutex_lock(&group->lock);
    if (group->busy || group->first) {
        pthread_mutex_unlock(&group->lock);
        ff_op *op = ff_post(group, call);
        if (!op)
            return (int)(report->status = FF_NO_MEMORY);
        int status = ff_wait(group, op, -1, report);
        ff_op_free(group, op);
        return status;
    }
    group->busy = true;
    pthread_mutex_unlock(&group->lock);
    int status = run_call(group, call, report, false);
    pthread_mutex_lock(&group->lock);
    group->busy = false;
    wake_thread(group);
    if (group->waiters)
        pthread_cond_broadcast(&group->done);
    pthread_mutex_unlock(&group->lock);
    return status;
}

/* Others read the row meanwhile: what is in it belongs to `seq` while that is there. */
static void note_begin(const ff_note *note, uint64_t now_ns)
{
    ff_event *row = note->row;
    atomic_store_explicit(&row->seq, 0, memory_order_relaxed);
    atomic_exchange_explicit(&row->end_ns, 0, memory_order_acq_rel);    /* before it nobody's, after it written */
    row->begin_ns = (int64_t)now_ns;
    row->blocked_ns = row->start_ns = row->cpu_ns = 0;
    row->size_bytes = note->size_bytes;
    row->number = note->number;
    row->step = note->step;
    row->what = note->what;
    atomic_store_explicit(&row->seq, note->seq, memory_order_release);
}

static void note_end(const ff_note *note, uint64_t begin_ns, uint64_t started_ns)
{
    ff_event *row = note->row;
    if (atomic_load_explicit(&row->seq, memory_order_relaxed) != note->seq)
        return;                 /* the ring has come round */
    uint64_t now_ns = ff_now_ns();
    row->blocked_ns = (int64_t)(now_ns - begin_ns);
    row->start_ns = (int64_t)started_ns;
    atomic_store_explicit(&row->end_ns, (int64_t)now_ns, memory_order_release);
}

int ff_run(ff_group *group, const ff_call *call, ff_report *report)
{
    const ff_note *note = &call->note;
    if (!note->row)
        return run_now(group, call, report);
    uint64_t begin_ns = ff_now_ns();
    note_begin(note, begin_ns);
    int status = run_now(group, call, report);
    if (!status)                /* else it never ended */
        note_end(note, begin_ns, report->started_ns);
    return status;
}

int ff_all_reduce_noted(ff_group *group, uint32_t dtype, uint32_t reduction, uint64_t count, void *data,
                        double timeout_s, ff_report *report, ff_event *row, uint64_t seq, uint32_t number,
                        uint32_t step, uint64_t what)
{
    const ff_call call = {
        .kind = FF_ALLREDUCE,
        .dtype = dtype,
        .reduction = reduction,
        .count = count,
        .in = data,
        .out = data,
        .timeout_s = timeout_s,
        .note = {row, seq, (int64_t)(count * ff_dtype_bytes(dtype)), number, step, what},
    };
    return ff_run(group, &call, report);
}

int ff_all_reduce(ff_group *group, uint32_t dtype, uint32_t reduction, uint64_t count, void *data,
                  double timeout_s, ff_report *report)
{
    return ff_all_reduce_noted(group, dtype, reduction, count, data, timeout_s, report, NULL, 0, 0, 0, 0);
}

ff_op *ff_post(ff_group *group, const ff_call *call)
{
    ff_op *op = calloc(1, sizeof *op);
    if (!op)
        return NULL;
    op->call = *call;
    pthread_mutex_lock(&group->lock);
    if (group->last)
        group->last->next = op;
    else
        group->first = op;
    group->last = op;
    group->posted_ns = ff_now_ns();
    if (!group->has_thread)
        start_thread(group);
    wake_thread(group);
    pthread_mutex_unlock(&group->lock);
    return op;
}

int ff_op_done(ff_op *op)
{
    return (int)atomic_load_explicit(&op->done, memory_order_acquire);
}

/* Others run the queue: wait for them until `deadline_ns`. */
static bool wait_for_others(ff_group *group, uint64_t deadline_ns)
{
    struct timespec until = {.tv_sec = (time_t)(deadline_ns / UINT64_C(1000000000)),
                             .tv_nsec = (long)(deadline_ns % UINT64_C(1000000000))};
    group->waiters++;
    int late = deadline_ns == UINT64_MAX ? pthread_cond_wait(&group->done, &group->lock)
                                         : pthread_cond_timedwait(&group->done, &group->lock, &until);
    group->waiters--;
    return late == 0;
}

int ff_wait(ff_group *group, ff_op *op, double timeout_s, ff_report *report)
{
    uint64_t deadline_ns = ff_deadline_ns(timeout_s);
    bool late = false;
    if (!ff_op_done(op)) {
        pthread_mutex_lock(&group->lock);
        while (!ff_op_done(op) && !late) {
            if (!group->busy && group->first)
                run_first(group, false);
            else
                late = !wait_for_others(group, deadline_ns) && ff_now_ns() >= deadline_ns;
        }
        wake_thread(group);
        pthread_mutex_unlock(&group->lock);
    }
    if (!ff_op_done(op)) {
        report->kind = op->call.kind;
        return (int)(report->status = FF_TIMEOUT);
    }
    *report = op->report;
    return (int)op->report.status;
}

void ff_op_free(ff_group *group, ff_op *op)
{
    pthread_mutex_lock(&group->lock);
    if (ff_op_done(op))
        free(op);
    else
        op->forgotten = true;
    pthread_mutex_unlock(&group->lock);
}

void ff_queue_close(ff_group *group)
{
    pthread_mutex_lock(&group->lock);
    group->stopping = true;
    bool pending = group->busy || group->first;
    pthread_cond_broadcast(&group->work);
    pthread_mutex_unlock(&group->lock);
    if (pending)
        ff_group_break(group);
    if (group->has_thread)
        pthread_join(group->thread, NULL);
    pthread_mutex_lock(&group->lock);
    while (group->busy)
        wait_for_others(group, UINT64_MAX);
    while (group->first)
        run_first(group, true);     /* fails at once: the group is broken */
    pthread_mutex_unlock(&group->lock);
    pthread_cond_destroy(&group->work);
    pthread_cond_destroy(&group->done);
    pthread_mutex_destroy(&group->lock);
}
