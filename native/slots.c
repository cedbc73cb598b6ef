/* Slots with known holders: a reference is a bit, so that those of a process that was killed can be found
 * and dropped by anyone, and dropping twice does no harm. */
#include "internal.h"

enum { HOLDERS = 64 };

struct slots {
    uint64_t magic;
    uint32_t count;
    _Atomic uint32_t freed;                  /* changes when a slot becomes free */
    _Atomic uint32_t pids[HOLDERS];          /* 0: this number is free */
    _Alignas(64) _Atomic uint64_t holders[]; /* per slot, one bit per holder; 0: free */
};

size_t ff_slots_bytes(uint32_t slots)
{
    return sizeof(struct slots) + slots * sizeof(uint64_t);
}

int ff_slots_set_up(void *memory, uint32_t count)
{
    struct slots *slots = memory;
    slots->count = count;
    slots->magic = MAGIC;
    return 0;
}

int ff_slots_join(void *memory, uint32_t pid)
{
    struct slots *slots = memory;
    for (int i = 0; i < HOLDERS; i++) {
        uint32_t nobody = 0;
        if (atomic_compare_exchange_strong(&slots->pids[i], &nobody, pid))
            return i;
    }
    return -1;
}

uint32_t ff_slots_holder(void *memory, int holder)
{
    return atomic_load(&((struct slots *)memory)->pids[holder]);
}

void ff_slots_leave(void *memory, int holder)
{
    struct slots *slots = memory;
    for (uint32_t slot = 0; slot < slots->count; slot++)
        ff_slot_drop(memory, (int)slot, holder);
    atomic_store(&slots->pids[holder], 0);
}

static int take_free(struct slots *slots, int holder)
{
    for (uint32_t slot = 0; slot < slots->count; slot++) {
        uint64_t nobody = 0;
        if (atomic_load_explicit(&slots->holders[slot], memory_order_relaxed) == 0 &&
            atomic_compare_exchange_strong(&slots->holders[slot], &nobody, UINT64_C(1) << holder))
            return (int)slot;
    }
    return -1;
}

int ff_slot_take(void *memory, int holder, double timeout_s)
{
    struct slots *slots = memory;
    uint64_t deadline_ns = ff_deadline_ns(timeout_s);
    for (;;) {
        uint32_t seen = atomic_load(&slots->freed);
        int slot = take_free(slots, holder);
        uint64_t now_ns = ff_now_ns();
        if (slot >= 0 || now_ns >= deadline_ns)
            return slot;
        ff_futex_wait(&slots->freed, seen, deadline_ns - now_ns);
    }
}

int ff_slot_hold(void *memory, int slot, int holder)
{
    struct slots *slots = memory;
    uint64_t holders = atomic_load(&slots->holders[slot]);
    while (holders)
        if (atomic_compare_exchange_weak(&slots->holders[slot], &holders,
                                         holders | UINT64_C(1) << holder))
            return 1;
    return 0;
}

void ff_slot_drop(void *memory, int slot, int holder)
{
    struct slots *slots = memory;
    uint64_t own = UINT64_C(1) << holder;
    if (atomic_fetch_and(&slots->holders[slot], ~own) == own) {
        atomic_fetch_add(&slots->freed, 1);
        ff_futex_wake(&slots->freed);
    }
}

uint64_t ff_slot_holders(void *memory, int slot)
{
    return atomic_load(&((struct slots *)memory)->holders[slot]);
}
