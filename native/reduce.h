/* The builds of reduce.c, one per set of instructions. */
#ifndef FIVEFOLD_REDUCE_H
#define FIVEFOLD_REDUCE_H

#include "internal.h"

struct ff_reductions {
    ff_reduce of_all[FF_DTYPES][FF_REDUCTIONS];
    ff_reduce of_some[FF_DTYPES][FF_REDUCTIONS];    /* of the ranks: means are sums, 16-bit floats become float */
    ff_reduce of_parts[FF_DTYPES][FF_REDUCTIONS];   /* of such, in the order of ranks */
};

extern const struct ff_reductions ff_reduce_plain;
#ifdef FF_HAS_AVX2
extern const struct ff_reductions ff_reduce_avx2;
#endif
#ifdef FF_HAS_AVX512
extern const struct ff_reductions ff_reduce_avx512;
#endif

#endif
