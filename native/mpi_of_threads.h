/* See mpi_of_threads.c. */
#ifndef FIVEFOLD_MPI_OF_THREADS_H
#define FIVEFOLD_MPI_OF_THREADS_H

#include "fivefold.h"

void use_mpi_of_threads(void);

#endif
