/* Sums, products and the like of as many arrays as there are ranks, always in the order of ranks.
 *
 * Built once per set of instructions, which FF_BUILD names; dispatch.c chooses.
 * Arithmetic of 16-bit floats is float's, rounded once at the end.
 */
#include "reduce.h"

#include <string.h>

#ifndef FF_BUILD
#define FF_BUILD ff_reduce_plain
#endif

enum { BLOCK = 512 };   /* elements that stay in the first-level cache while all ranks' are added */

static inline float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float from_bf16(uint16_t half)
{
    return float_of((uint32_t)half << 16);
}

static inline uint16_t to_bf16(float value)
{
    uint32_t bits = bits_of(value);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    uint32_t nan = bits >> 16 | 0x40;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded);
}

static inline float from_f16(uint16_t half)
{
    uint32_t rest = half & 0x7fff, sign = (uint32_t)(half & 0x8000) << 16;
    uint32_t tiny = bits_of((float)(int32_t)rest * 0x1p-24f);           /* also zero */
    uint32_t usual = (rest << 13) + (rest >= 0x7c00 ? 0x70000000u : 0x38000000u);
    return float_of(sign | (rest < 0x400 ? tiny : usual));
}

static inline uint16_t to_f16(float value)
{
    uint32_t bits = bits_of(value), rest = bits & 0x7fffffff, sign = bits >> 16 & 0x8000;
    uint32_t tiny = bits_of(float_of(rest) + 0.5f) - 0x3f000000u;        /* 0.5f has steps of 2^-24 */
    uint32_t usual = (rest + 0xfff + (rest >> 13 & 1) - 0x38000000u) >> 13;
    uint32_t nan = 0x7e00 | (rest >> 13 & 0x3ff);
    uint32_t half = rest < 0x38800000u ? tiny : usual;
    half = rest >= 0x477ff000u ? 0x7c00 : half;
    half = rest > 0x7f800000u ? nan : half;
    return (uint16_t)(sign | half);
}

#define SAME(x) (x)
#define ADD(a, b) ((a) + (b))
#define MULTIPLY(a, b) ((a) * (b))
#define LESS(a, b) (((a) < (b) || (a) != (a)) ? (a) : (b))      /* not-a-number wins, as in torch */
#define GREATER(a, b) (((a) > (b) || (a) != (a)) ? (a) : (b))
#define AND(a, b) ((a) & (b))
#define OR(a, b) ((a) | (b))
#define XOR(a, b) ((a) ^ (b))
#define MEAN(x) ((x) / ranks)

/* T: as stored; A: as computed; LOAD, STORE: between them; OP; LAST: applied to the result.
 * `out` may be one of the sources: an element is written after all of it was read. */
#define REDUCTION(NAME, T, A, LOAD, STORE, OP, LAST)                                                 \
    static void NAME(void *out, const void *const *sources, int n, size_t count)                     \
    {                                                                                                \
        const T *const *in = (const T *const *)sources;                                              \
        const A ranks = (A)n;                                                                        \
        (void)ranks;                                                                                 \
        if (n == 1) {                                                                                \
            memmove(out, in[0], count * sizeof(T));                                                  \
            return;                                                                                  \
        }                                                                                            \
        for (size_t at = 0; at < count; at += BLOCK) {                                               \
            const size_t m = count - at < BLOCK ? count - at : BLOCK;                                \
            const T *first = in[0] + at, *last = in[n - 1] + at;                                     \
            T *to = (T *)out + at;                                                                   \
            A sum[BLOCK];                                                                            \
            if (n == 2) {                                                                            \
                SIMD for (size_t i = 0; i < m; i++)                                                  \
                    to[i] = STORE((A)LAST(OP(LOAD(first[i]), LOAD(last[i]))));                       \
                continue;                                                                            \
            }                                                                                        \
            SIMD for (size_t i = 0; i < m; i++) sum[i] = LOAD(first[i]);                             \
            for (int q = 1; q < n - 1; q++) {                                                        \
                const T *next = in[q] + at;                                                          \
                SIMD for (size_t i = 0; i < m; i++) sum[i] = OP(sum[i], LOAD(next[i]));              \
            }                                                                                        \
            SIMD for (size_t i = 0; i < m; i++)                                                      \
                to[i] = STORE((A)LAST(OP(sum[i], LOAD(last[i]))));                                   \
        }                                                                                            \
    }
#define SIMD _Pragma("omp simd")

#define ARITHMETIC(T, N, A, LOAD, STORE)                                                             \
    REDUCTION(N##_sum, T, A, LOAD, STORE, ADD, SAME)                                                 \
    REDUCTION(N##_avg, T, A, LOAD, STORE, ADD, MEAN)                                                 \
    REDUCTION(N##_prod, T, A, LOAD, STORE, MULTIPLY, SAME)                                           \
    REDUCTION(N##_min, T, A, LOAD, STORE, LESS, SAME)                                                \
    REDUCTION(N##_max, T, A, LOAD, STORE, GREATER, SAME)

#define BITWISE(T, N)                                                                                \
    REDUCTION(N##_band, T, T, SAME, SAME, AND, SAME)                                                 \
    REDUCTION(N##_bor, T, T, SAME, SAME, OR, SAME)                                                   \
    REDUCTION(N##_bxor, T, T, SAME, SAME, XOR, SAME)

#define INTEGER(T, N) ARITHMETIC(T, N, T, SAME, SAME) BITWISE(T, N)

INTEGER(uint8_t, u8)
INTEGER(int8_t, i8)
INTEGER(uint16_t, u16)
INTEGER(int16_t, i16)
INTEGER(uint32_t, u32)
INTEGER(int32_t, i32)
INTEGER(uint64_t, u64)
INTEGER(int64_t, i64)
ARITHMETIC(uint16_t, f16, float, from_f16, to_f16)
ARITHMETIC(uint16_t, bf16, float, from_bf16, to_bf16)
ARITHMETIC(float, f32, float, SAME, SAME)
ARITHMETIC(double, f64, double, SAME, SAME)

#define FLOATS(N) {N##_sum, N##_avg, N##_prod, N##_min, N##_max, NULL, NULL, NULL}
#define INTEGERS(N) {N##_sum, N##_avg, N##_prod, N##_min, N##_max, N##_band, N##_bor, N##_bxor}

/* Truth values: any of them is the sum, all of them the product. */
const ff_reduce FF_BUILD[FF_DTYPES][FF_REDUCTIONS] = {
    [FF_U8] = INTEGERS(u8),    [FF_I8] = INTEGERS(i8),    [FF_U16] = INTEGERS(u16),
    [FF_I16] = INTEGERS(i16),  [FF_U32] = INTEGERS(u32),  [FF_I32] = INTEGERS(i32),
    [FF_U64] = INTEGERS(u64),  [FF_I64] = INTEGERS(i64),
    [FF_BOOL] = {u8_bor, NULL, u8_band, u8_band, u8_bor, u8_band, u8_bor, u8_bxor},
    [FF_F16] = FLOATS(f16),    [FF_BF16] = FLOATS(bf16),  [FF_F32] = FLOATS(f32),
    [FF_F64] = FLOATS(f64),
};
