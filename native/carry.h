/* Moving pieces of tensors between nodes, and adding them as they come. */
#ifndef FIVEFOLD_CARRY_H
#define FIVEFOLD_CARRY_H

#include "internal.h"

struct sum;

/* What moves between this rank and one other. Those of one peer and direction move in the order in which they were
 * added to the list, and both sides add the same. */
struct piece {
    int peer;
    bool sends, begun, over;
    char *data;
    size_t bytes, at;           /* all that is before `at` has moved */
    size_t given;               /* of what is sent: streams carry it, or have carried it, up to here */
    size_t unit;                /* of what is received by several: all before this one have come, */
    uint64_t came;              /* and those of the next 64 */
    const size_t *limit;        /* of what is sent: so much of it is there; NULL: all */
    struct sum *sum;            /* of what is received: `data` is a ring, of which what was added is free again */
};

/* Parts of a result, one per node, which are added in the order of nodes as soon as all have come. */
struct sum {
    ff_reduce add;
    int nodes, own;
    const char *part;           /* this node's */
    const struct piece **parts; /* the others', by node */
    const struct piece *leaving;        /* what sends `part` from where the result goes, or NULL */
    size_t part_size, size;     /* of an element of parts and of the result */
    size_t count, added;        /* elements */
    size_t ring_bytes;
    size_t ready_bytes;         /* of the result */
    int ranks;                  /* of a mean */
    char *out;
};

struct list {
    struct run *run;
    struct piece *pieces;
    const struct piece **parts; /* room for those of a sum */
    int count;
    struct sum *sum;            /* of what is received, or NULL */
    struct list *next;          /* what may move as well, after these */
};

struct list ff_pieces(struct run *run);         /* nothing yet */
struct list ff_more_pieces(struct run *run);    /* a second list at a time */
struct piece *ff_send_piece(struct list *list, int peer, const void *data, size_t bytes);
struct piece *ff_receive_piece(struct list *list, int peer, void *data, size_t bytes);
int ff_carry(struct list *list);                /* until all of it has moved, and its sum is made */
int ff_carry_some(struct list *list);           /* what can be moved at once */
char *ff_scratch(struct run *run, size_t bytes);    /* until the next one; NULL: no memory, and the group is broken */

/* within.c: see there. */
struct blocks {
    const char *in[FF_MAX_LOCAL];
    char *out[FF_MAX_LOCAL];
    size_t in_bytes[FF_MAX_LOCAL], out_bytes[FF_MAX_LOCAL];
};

/* Some elements of each rank's input. */
struct span {
    const char *at;
    size_t count;
};

int ff_show(struct run *run, const void *own, const size_t *bytes, char *const *to);
int ff_swap(struct run *run, const struct blocks *own);
int ff_add_spans(struct run *run, const struct span *spans, char *part, size_t part_size, ff_reduce add);

/* A node whose rank is missing says so to the others within this. */
#define FF_GRACE_NS UINT64_C(1000000000)

/* doubling.c: among the first ranks of nodes. */
struct doubled {
    char *own, *room;           /* this node's part, which becomes that of its block; and as much room */
    char *out;
    size_t count, size;         /* elements, and bytes of one of a part */
    ff_reduce pair, last;       /* two parts to one, and the last two to the result */
};

int ff_double_up(struct run *run, const struct doubled *of);
int ff_gather_doubling(struct run *run, char *all, const size_t *begins);
int ff_meet_leaders(struct run *run);
/* In each round those who wait for the culprit itself say so before the others. */
#define FF_ROUND_GRACE_NS (FF_GRACE_NS / 4)
uint64_t ff_rounds_grace_ns(const struct nodes *nodes);     /* of all rounds */

/* What rings have room for, at most; and what is added at a time. The first is a multiple of the second. */
extern const size_t FF_RING_BYTES, FF_ADDED_BYTES;

#endif
