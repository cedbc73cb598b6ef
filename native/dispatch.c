/* Which build of the reductions this processor can run. */
#include "reduce.h"

static const struct ff_reductions *chosen(const char **name)
{
#ifdef FF_HAS_AVX512
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
        *name = "avx512";
        return &ff_reduce_avx512;
    }
#endif
#ifdef FF_HAS_AVX2
    if (__builtin_cpu_supports("avx2")) {
        *name = "avx2";
        return &ff_reduce_avx2;
    }
#endif
    *name = "plain";
    return &ff_reduce_plain;
}

const char *ff_instructions(void)
{
    const char *name;
    chosen(&name);
    return name;
}

static bool exists(uint32_t dtype, uint32_t reduction)
{
    return dtype < FF_DTYPES && reduction < FF_REDUCTIONS;
}

ff_reduce ff_reduction_of(uint32_t dtype, uint32_t reduction)
{
    const char *name;
    return exists(dtype, reduction) ? chosen(&name)->of_all[dtype][reduction] : NULL;
}

ff_reduce ff_reduction_of_some(uint32_t dtype, uint32_t reduction)
{
    const char *name;
    return exists(dtype, reduction) ? chosen(&name)->of_some[dtype][reduction] : NULL;
}

ff_reduce ff_reduction_of_parts(uint32_t dtype, uint32_t reduction)
{
    const char *name;
    return exists(dtype, reduction) ? chosen(&name)->of_parts[dtype][reduction] : NULL;
}

size_t ff_dtype_bytes(uint32_t dtype)
{
    static const size_t bytes[FF_DTYPES] = {
        [FF_U8] = 1, [FF_I8] = 1, [FF_BOOL] = 1, [FF_U16] = 2, [FF_I16] = 2, [FF_F16] = 2, [FF_BF16] = 2,
        [FF_U32] = 4, [FF_I32] = 4, [FF_F32] = 4, [FF_U64] = 8, [FF_I64] = 8, [FF_F64] = 8,
    };
    return dtype < FF_DTYPES ? bytes[dtype] : 0;
}
