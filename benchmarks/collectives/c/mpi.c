/* All-reduce of floats over MPI, in place: `mpirun -n 2 mpi BYTES...` */
#include "turns.h"

#include <mpi.h>

static void sum(float *data, size_t floats)
{
    MPI_Allreduce(MPI_IN_PLACE, data, (int)floats, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

int main(int count, char **words)
{
    int rank;
    MPI_Init(&count, &words);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    for (int i = 1; i < count; i++)
        turn(strtoul(words[i], NULL, 10), rank, sum);
    MPI_Finalize();
    return 0;
}
