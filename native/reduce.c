/* Sums, products and the like of as many arrays as there are ranks, always in the order of a binary tree over the
 * ranks: a node that has the ranks of a branch can add them alone, and all get the same bits.
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
enum { LEVELS = 8 };    /* of the tree, less one */

/* How many ones a number ends with. */
static inline int ends_of(int number)
{
    int ones = 0;
    for (; number >> ones & 1; ones++) ;
    return ones;
}

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

/* IN, OUT: as read and written; A: as computed; LOAD, STORE: between them; OP; LAST: applied to the result.
 * `out` may be one of the sources: an element is written after all of it was read.
 *
 * Pairs are added as they come, and so are pairs of pairs: partial[l] holds the sum of 2^(l+1) sources.
 *
 *     ((0 + 1) + (2 + 3)) + 4         five sources
 */
#define REDUCTION(NAME, IN, A, OUT, LOAD, STORE, OP, LAST)                                           \
    static void NAME(void *out, const void *const *sources, int n, int of, size_t count)             \
    {                                                                                                \
        const IN *const *in = (const IN *const *)sources;                                            \
        const A ranks = (A)of;                                                                       \
        (void)ranks;                                                                                 \
        for (size_t at = 0; at < count; at += BLOCK) {                                               \
            const size_t m = count - at < BLOCK ? count - at : BLOCK;                                \
            const IN *last = in[n - 1] + at;                                                         \
            OUT *to = (OUT *)out + at;                                                               \
            A partial[LEVELS][BLOCK], sum[BLOCK];                                                    \
            if (n == 1) {                                                                            \
                SIMD for (size_t i = 0; i < m; i++) to[i] = STORE((A)LAST(LOAD(last[i])));           \
                continue;                                                                            \
            }                                                                                        \
            if (n == 2) {                                                                            \
                const IN *first = in[0] + at;                                                        \
                SIMD for (size_t i = 0; i < m; i++)                                                  \
                    to[i] = STORE((A)LAST(OP(LOAD(first[i]), LOAD(last[i]))));                       \
                continue;                                                                            \
            }                                                                                        \
            for (int pair = 0; pair < n / 2; pair++) {                                               \
                const IN *one = in[2 * pair] + at, *other = in[2 * pair + 1] + at;                   \
                const int level = ends_of(pair);                                                     \
                A *into = level ? sum : partial[0];                                                  \
                SIMD for (size_t i = 0; i < m; i++) into[i] = OP(LOAD(one[i]), LOAD(other[i]));      \
                for (int l = 0; l < level; l++) {                                                    \
                    A *next = l + 1 < level ? sum : partial[level];                                  \
                    SIMD for (size_t i = 0; i < m; i++) next[i] = OP(partial[l][i], sum[i]);         \
                }                                                                                    \
            }                                                                                        \
            int level = 0;                                                                           \
            while (!(n / 2 >> level & 1))                                                            \
                level++;                                                                             \
            const A *rest = partial[level++];                                                        \
            if (n % 2) {                                                                             \
                SIMD for (size_t i = 0; i < m; i++) sum[i] = OP(rest[i], LOAD(last[i]));             \
                rest = sum;                                                                          \
            }                                                                                        \
            for (; n / 2 >> level; level++) {                                                        \
                if (!(n / 2 >> level & 1))                                                           \
                    continue;                                                                        \
                SIMD for (size_t i = 0; i < m; i++) sum[i] = OP(partial[level][i], rest[i]);         \
                rest = sum;                                                                          \
            }                                                                                        \
            SIMD for (size_t i = 0; i < m; i++) to[i] = STORE((A)LAST(rest[i]));                     \
        }                                                                                            \
    }
#define SIMD _Pragma("omp simd")

#define ARITHMETIC(T, N, A, LOAD, STORE)                                                             \
    REDUCTION(N##_sum, T, A, T, LOAD, STORE, ADD, SAME)                                              \
    REDUCTION(N##_avg, T, A, T, LOAD, STORE, ADD, MEAN)                                              \
    REDUCTION(N##_prod, T, A, T, LOAD, STORE, MULTIPLY, SAME)                                        \
    REDUCTION(N##_min, T, A, T, LOAD, STORE, LESS, SAME)                                             \
    REDUCTION(N##_max, T, A, T, LOAD, STORE, GREATER, SAME)

/* Of some ranks, not rounded; and of such. */
#define IN_PARTS(N, LOAD, STORE)                                                                     \
    REDUCTION(N##_part_sum, uint16_t, float, float, LOAD, SAME, ADD, SAME)                           \
    REDUCTION(N##_part_prod, uint16_t, float, float, LOAD, SAME, MULTIPLY, SAME)                     \
    REDUCTION(N##_part_min, uint16_t, float, float, LOAD, SAME, LESS, SAME)                          \
    REDUCTION(N##_part_max, uint16_t, float, float, LOAD, SAME, GREATER, SAME)                       \
    REDUCTION(N##_of_parts_sum, float, float, uint16_t, SAME, STORE, ADD, SAME)                      \
    REDUCTION(N##_of_parts_avg, float, float, uint16_t, SAME, STORE, ADD, MEAN)                      \
    REDUCTION(N##_of_parts_prod, float, float, uint16_t, SAME, STORE, MULTIPLY, SAME)                \
    REDUCTION(N##_of_parts_min, float, float, uint16_t, SAME, STORE, LESS, SAME)                     \
    REDUCTION(N##_of_parts_max, float, float, uint16_t, SAME, STORE, GREATER, SAME)

#define BITWISE(T, N)                                                                                \
    REDUCTION(N##_band, T, T, T, SAME, SAME, AND, SAME)                                              \
    REDUCTION(N##_bor, T, T, T, SAME, SAME, OR, SAME)                                                \
    REDUCTION(N##_bxor, T, T, T, SAME, SAME, XOR, SAME)

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
IN_PARTS(f16, from_f16, to_f16)
IN_PARTS(bf16, from_bf16, to_bf16)

#define FLOATS(N) {N##_sum, N##_avg, N##_prod, N##_min, N##_max, NULL, NULL, NULL}
#define INTEGERS(N) {N##_sum, N##_avg, N##_prod, N##_min, N##_max, N##_band, N##_bor, N##_bxor}

#define PARTS(N) {N##_sum, N##_sum, N##_prod, N##_min, N##_max, NULL, NULL, NULL}
#define PARTS_OF_INTEGERS(N) {N##_sum, N##_sum, N##_prod, N##_min, N##_max, N##_band, N##_bor, N##_bxor}
/* Truth values: any of them is the sum, all of them the product. */
#define BOOLS {u8_bor, NULL, u8_band, u8_band, u8_bor, u8_band, u8_bor, u8_bxor}
#define TABLE(INTEGERS, FLOATS, F16, BF16)                                                           \
    {                                                                                                \
        [FF_U8] = INTEGERS(u8), [FF_I8] = INTEGERS(i8), [FF_U16] = INTEGERS(u16), [FF_I16] = INTEGERS(i16),   \
        [FF_U32] = INTEGERS(u32), [FF_I32] = INTEGERS(i32), [FF_U64] = INTEGERS(u64), [FF_I64] = INTEGERS(i64), \
        [FF_BOOL] = BOOLS, [FF_F16] = FLOATS(F16), [FF_BF16] = FLOATS(BF16), [FF_F32] = FLOATS(f32),   \
        [FF_F64] = FLOATS(f64),                                                                      \
    }

const struct ff_reductions FF_BUILD = {
    .of_all = TABLE(INTEGERS, FLOATS, f16, bf16),
    .of_some = TABLE(PARTS_OF_INTEGERS, PARTS, f16_part, bf16_part),
    .of_parts = TABLE(INTEGERS, FLOATS, f16_of_parts, bf16_of_parts),
};
