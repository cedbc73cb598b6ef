/* The builds of reduce.c, one per set of instructions. */
#ifndef FIVEFOLD_REDUCE_H
#define FIVEFOLD_REDUCE_H

#include "internal.h"

typedef const ff_reduce ff_reductions[FF_DTYPES][FF_REDUCTIONS];

extern ff_reductions ff_reduce_plain;
#ifdef FF_HAS_AVX2
extern ff_reductions ff_reduce_avx2;
#endif
#ifdef FF_HAS_AVX512
extern ff_reductions ff_reduce_avx512;
#endif

#endif
