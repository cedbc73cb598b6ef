/* The same over the C core, between processes: `core RANKS BYTES...` */
#define _GNU_SOURCE
#include "turns.h"

#include "../../../native/fivefold.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { STAGING = 256 * 1024, RING = 4096 };

static ff_group *group;

static void sum(float *data, size_t floats)
{
    ff_report report = {0};
    if (ff_all_reduce(group, FF_F32, FF_SUM, floats, data, 60, &report))
        exit(1);
}

int main(int count, char **words)
{
    int ranks = atoi(words[1]), rank = 0;
    void *memory = mmap(NULL, ff_group_bytes(ranks, STAGING, RING), PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || ff_group_set_up(memory, ranks, STAGING, RING))
        return 1;
    for (int q = 1; q < ranks && rank == 0; q++)
        if (fork() == 0)
            rank = q;
    group = ff_group_open(memory, rank, ranks > sysconf(_SC_NPROCESSORS_ONLN));
    ff_report report = {0};
    if (!group || ff_group_probe(group, 60, &report))
        return 1;
    for (int i = 2; i < count; i++)
        turn(strtoul(words[i], NULL, 10), rank, sum);
    ff_group_close(group);
    while (rank == 0 && wait(NULL) > 0)
        ;
    return 0;
}
