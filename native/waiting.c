/* Waiting for a word in shared memory: spin while a core is to spare, then yield it, then sleep. */
#define _GNU_SOURCE
#include "internal.h"

#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* A rank that is about to arrive does so within microseconds; waking a core that sleeps costs tens. */
static const uint64_t SPIN_NS = 20 * 1000, BACKGROUND_SPIN_NS = 10 * 1000;
/* By time, not by number: while another process computes on this core, one yield takes milliseconds, after which
 * only sleep is right, because who sleeps is woken at once. */
static const uint64_t YIELD_NS = 100 * 1000, BACKGROUND_YIELD_NS = 2 * 1000;
enum { SPINS_PER_LOOK = 64 };

uint64_t ff_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

uint64_t ff_deadline_after(uint64_t now_ns, double timeout_s)
{
    if (timeout_s < 0 || timeout_s > 1e9)
        return UINT64_MAX;
    return now_ns + (uint64_t)(timeout_s * 1e9);
}

uint64_t ff_deadline_ns(double timeout_s)
{
    return ff_deadline_after(ff_now_ns(), timeout_s);
}

struct patience ff_patience(const ff_group *group, uint64_t deadline_ns, bool background)
{
    struct patience patience = {.deadline_ns = deadline_ns};
    if (!group->crowded)
        patience.spin_ns = background ? BACKGROUND_SPIN_NS : SPIN_NS;
    patience.yield_ns = background ? BACKGROUND_YIELD_NS : YIELD_NS;
    return patience;
}

static void pause_briefly(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory");   /* `yield` does nothing on most cores */
#endif
}

/* One step of waiting without sleep; false when it is time to sleep. How long a pause takes differs by ten
 * times between processors, so now and then it looks at the clock. */
bool ff_bide(struct patience *patience)
{
    if (patience->spin_ns) {
        pause_briefly();
        if (++patience->spins % SPINS_PER_LOOK == 0) {
            uint64_t now_ns = ff_now_ns();
            if (!patience->spun_ns)
                patience->spun_ns = now_ns + patience->spin_ns;
            else if (now_ns >= patience->spun_ns)
                patience->spin_ns = 0;
        }
        return true;
    }
    uint64_t now_ns = ff_now_ns();
    if (!patience->yielded_ns)
        patience->yielded_ns = now_ns + patience->yield_ns;
    if (now_ns >= patience->yielded_ns)
        return false;
    sched_yield();
    return true;
}

/* A thread of a group that finds nothing to do, though something was posted just now, looks again soon:
 * whoever posts one operation after the other need not wake it each time. Returns false if that was longer
 * ago, and the thread should sleep until it is woken. */
bool ff_nap(pthread_cond_t *until, pthread_mutex_t *lock, uint64_t posted_ns)
{
    static const uint64_t RECENT_NS = 2 * 1000 * 1000, NAP_NS = 100 * 1000;
    uint64_t now_ns = ff_now_ns();
    if (now_ns - posted_ns > RECENT_NS)
        return false;
    now_ns += NAP_NS;
    struct timespec end = {.tv_sec = (time_t)(now_ns / UINT64_C(1000000000)),
                           .tv_nsec = (long)(now_ns % UINT64_C(1000000000))};
    pthread_cond_timedwait(until, lock, &end);
    return true;
}

/* Conditions are waited for by the clock of ff_now_ns. */
void ff_condition(pthread_cond_t *condition)
{
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(condition, &monotonic);
    pthread_condattr_destroy(&monotonic);
}

void ff_futex_wake(_Atomic uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void ff_futex_wait(_Atomic uint32_t *word, uint32_t value, uint64_t ns)
{
    struct timespec time = {.tv_sec = (time_t)(ns / UINT64_C(1000000000)),
                            .tv_nsec = (long)(ns % UINT64_C(1000000000))};
    syscall(SYS_futex, word, FUTEX_WAIT, value, &time, NULL, 0);
}

uint32_t ff_word_read(void *word)
{
    return atomic_load_explicit((_Atomic uint32_t *)word, memory_order_acquire);
}

void ff_word_set(void *word, uint32_t value)
{
    atomic_store_explicit((_Atomic uint32_t *)word, value, memory_order_release);
    ff_futex_wake(word);
}

int ff_word_wait(void *word, uint32_t value, double timeout_s)
{
    uint64_t deadline_ns = ff_deadline_ns(timeout_s);
    while (ff_word_read(word) == value) {
        uint64_t now_ns = ff_now_ns();
        if (now_ns >= deadline_ns)
            return FF_TIMEOUT;
        ff_futex_wait(word, value, deadline_ns - now_ns);
    }
    return FF_OK;
}
