/* What both programs do alike: for every size on the command line, the mean over many calls in one line. */
#ifndef TURNS_H
#define TURNS_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static int calls_of(size_t bytes)
{
    return bytes <= 4096 ? 20000 : bytes <= 65536 ? 2000 : bytes <= (4u << 20) ? 50 : 6;
}

/* Rank 0 tells how long a call takes on average. As many calls before warm it up: the kernel needs a while until
 * it has given every rank a core of its own. */
static void turn(size_t bytes, int rank, void (*sum)(float *data, size_t floats))
{
    int calls = calls_of(bytes);
    float *data = malloc(bytes);
    double begun = 0;
    memset(data, 0, bytes);
    for (int i = -calls; i < calls; i++) {
        if (i == 0)
            begun = now_s();
        sum(data, bytes / sizeof(float));
    }
    if (rank == 0)
        printf("%.9f\n", (now_s() - begun) / calls);
    free(data);
}

#endif
