/* What mpi.c calls of MPI, for ranks that are threads of the driver: under sanitizers, which know nothing of MPI's own.
 *
 * Tags are of one process, and so of one stream: messages match by them alone. Long ones complete when they are received,
 * and anything only in a call, as in MPI.
 */
#include "mpi_of_threads.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

enum { SHORT_BYTES = 4096 };

struct request {
    bool done;
    size_t bytes;
};

struct transfer {
    int tag;
    char *data;
    size_t bytes;
    struct request *request;    /* NULL: the sender has it done already, and `data` is a copy */
    struct transfer *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct transfer *sent, *wanted;

static void append(struct transfer **list, struct transfer transfer)
{
    struct transfer *own = malloc(sizeof *own);
    *own = transfer;
    while (*list)
        list = &(*list)->next;
    *list = own;
}

static struct transfer *take(struct transfer **list, int tag, const struct request *request)
{
    for (; *list; list = &(*list)->next)
        if ((*list)->tag == tag || (request && (*list)->request == request)) {
            struct transfer *found = *list;
            *list = found->next;
            return found;
        }
    return NULL;
}

/* The first of those that were sent with each tag goes to the first that wants it. */
static void match(void)
{
    for (struct transfer **link = &wanted; *link;) {
        struct transfer *to = *link, *from = take(&sent, to->tag, NULL);
        if (!from) {
            link = &to->next;
            continue;
        }
        *link = to->next;
        if (from->bytes)
            memcpy(to->data, from->data, from->bytes);
        *to->request = (struct request){true, from->bytes};
        if (from->request)
            from->request->done = true;
        else
            free(from->data);
        free(from);
        free(to);
    }
}

static int start(bool sends, void *data, int bytes, int tag, uint64_t *handle)
{
    struct request *request = calloc(1, sizeof *request);
    struct transfer transfer = {.tag = tag, .data = data, .bytes = (size_t)bytes, .request = request};
    if (sends && bytes <= SHORT_BYTES) {
        transfer.data = malloc((size_t)bytes + 1);
        if (bytes)
            memcpy(transfer.data, data, (size_t)bytes);
        transfer.request = NULL;
        request->done = true;
    }
    *handle = (uint64_t)(uintptr_t)request;
    pthread_mutex_lock(&lock);
    append(sends ? &sent : &wanted, transfer);
    pthread_mutex_unlock(&lock);
    return 0;
}

static int send_later(void *data, int bytes, void *type, int to, int tag, void *comm, uint64_t *handle)
{
    (void)type, (void)to, (void)comm;
    return start(true, data, bytes, tag, handle);
}

static int receive_later(void *data, int bytes, void *type, int from, int tag, void *comm, uint64_t *handle)
{
    (void)type, (void)from, (void)comm;
    return start(false, data, bytes, tag, handle);
}

static int test(uint64_t *handle, int *done, void *status)
{
    struct request *request = (struct request *)(uintptr_t)*handle;
    pthread_mutex_lock(&lock);
    match();
    *done = request->done;
    memcpy(status, &request->bytes, sizeof request->bytes);
    pthread_mutex_unlock(&lock);
    if (*done)
        free(request);
    return 0;
}

static int count(const void *status, void *type, int *bytes)
{
    size_t all;
    (void)type;
    memcpy(&all, status, sizeof all);
    *bytes = (int)all;
    return 0;
}

static int cancel(uint64_t *handle)
{
    struct request *request = (struct request *)(uintptr_t)*handle;
    pthread_mutex_lock(&lock);
    free(take(&wanted, -1, request));
    request->done = true;
    pthread_mutex_unlock(&lock);
    return 0;
}

void use_mpi_of_threads(void)
{
    const ff_mpi mpi = {.send = (void *)send_later, .receive = (void *)receive_later, .test = (void *)test,
                        .count = (void *)count, .cancel = (void *)cancel, .pointers = 1, .tags = 1 << 30};
    ff_mpi_use(&mpi);
}
