/* What is under way between one rank and the others. */
#ifndef FIVEFOLD_MESSAGES_H
#define FIVEFOLD_MESSAGES_H

#include "internal.h"

struct ff_message {
    bool sends, begun, forgotten;
    bool offered;               /* not written to the ring: the reader takes it where it lies */
    int peer;                   /* -1: anyone, until a message has come */
    int32_t tag;
    uint32_t dtype;
    char *data;
    uint64_t bytes, at;         /* at: how much has been moved */
    size_t head_at;             /* to another node: how much of the head has been sent */
    uint64_t mark;              /* of an offered one: what the ring's `taken` reaches when it has been read */
    uint64_t deadline_ns;
    ff_report report;
    _Atomic uint32_t done;
    ff_message *next;
};

/* A message that came before it was asked for, while another from the same rank was. */
struct stray {
    int peer;
    int32_t tag;
    uint32_t dtype;
    char *data;
    uint64_t bytes;
    bool complete;
    ff_message *taker;
    struct stray *next;
};

/* What is being read out of the ring of a peer. */
struct coming {
    struct head head;           /* from another node, and how much of it has come */
    size_t head_at;
    bool active;
    uint64_t bytes, at;
    struct view view;           /* of an offered message */
    ff_message *message;        /* its reader, or */
    struct stray *stray;
};

struct messages {
    pthread_mutex_t lock;
    pthread_cond_t work;
    ff_message *sends[FF_MAX_RANKS];    /* to each peer, the first of them being written */
    ff_message *offers[FF_MAX_RANKS];   /* to each peer, those that it has not read yet */
    ff_message *receives;               /* in the order in which they were posted */
    struct stray *strays;               /* in the order in which they came */
    uint64_t stray_bytes, stray_limit;  /* of all of them together */
    struct coming coming[FF_MAX_RANKS];
    uint64_t posted;
    int pending, waiters;
    bool stopping, has_thread, thread_sleeps;
    uint64_t posted_ns;
    int naps;                           /* in a row, in which nothing moved */
    pthread_t thread;
};

/* messages.c, rings.c, letters.c; the lock is held */
bool ff_messages_move(ff_group *group);                              /* whether anything moved */
bool ff_messages_take_stray(ff_group *group, ff_message *message);
void ff_messages_append(ff_message **list, ff_message *message);
void ff_messages_settle(struct messages *all, ff_message *message, int status);

/* Of rings.c: what came is for a receiver, or a stray; where its bytes go, NULL where they are not wanted; its end. */
bool ff_coming_begin(ff_group *group, int peer, uint64_t bytes, int32_t tag, uint32_t dtype);
char *ff_coming_to(const struct coming *coming);
void ff_coming_end(struct messages *all, struct coming *coming);
bool ff_anyone_listens(const struct messages *all, int peer);

/* letters.c: to and from other nodes */
bool ff_letter_push(ff_group *group, ff_message *message);
bool ff_letter_pull(ff_group *group, int peer);
void ff_letters_sleep(ff_group *group, uint32_t seen);

#endif
