/* The arithmetic of the packed AdamW, as plain loops that compilers vectorise.
 *
 * This file is compiled once for each instruction set, with ISA as the suffix of its one public function. All of
 * them give the same bits: fp32, every operation rounded on its own (-ffp-contract=off), no fast-math.
 *
 * But for fp32 moments, elements are processed in pairs (even, odd): a pair of bf16 numbers is a 32-bit word: the
 * even element is the word shifted left by 16 bits, the odd one the word without its lower half, so that reading and
 * writing take no shuffles, and one hash makes the random bits of both. Blocks are always whole: a tensor's short
 * last block is padded with zeros in a copy, which changes neither its maximum nor any element.
 *
 * Names: p parameter, g gradient, m first moment (exp_avg), v second moment (exp_avg_sq).
 */
#include "adamw.h"

#include <math.h>
#include <string.h>

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

#define INLINE static inline __attribute__((always_inline))

/* Pairs in a block. */
#define PAIRS (BLOCK / 2)

#define UPPER 0xffff0000u

/* Tensors may lie at any address, and words are read over halves and codes. */
typedef uint16_t __attribute__((may_alias, aligned(1))) u16_t;
typedef uint32_t __attribute__((may_alias, aligned(1))) u32_t;
typedef float __attribute__((may_alias, aligned(1))) f32_t;

typedef struct {
    float even, odd;
} pair_t;

typedef struct {
    unsigned char *p, *g, *m, *v, *remainder;
    f32_t *m_scale, *v_scale;
    uint32_t pair; /* position of the first pair in the parameter; lower 32 bits */
    uint32_t key_p, key_v;
} block_t;

INLINE float as_float(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

INLINE uint32_t as_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* 16 random bits for each element of a pair. */
typedef struct {
    uint32_t even, odd;
} random_t;

/* The halves of a 32-bit integer hash with low bias (https://github.com/skeeto/hash-prospector): formats.lowbias32. */
INLINE random_t random_bits(uint32_t x)
{
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    const uint32_t upper = x >> 16;
    return (random_t){(x ^ upper) & 0xffff, upper};
}

/* ---- fp32 and bf16 ---- */

INLINE pair_t load_fp32(const void *from, int j)
{
    const f32_t *x = from;
    return (pair_t){x[2 * j], x[2 * j + 1]};
}

INLINE void store_fp32(void *to, int j, float even, float odd)
{
    f32_t *y = to;
    y[2 * j] = even;
    y[2 * j + 1] = odd;
}

INLINE pair_t load_bf16(const void *from, int j)
{
    uint32_t word = ((const u32_t *)from)[j];
    return (pair_t){as_float(word << 16), as_float(word & UPPER)};
}

/* Stores the upper halves of two fp32 numbers, to whose bits something has been added. */
INLINE void store_upper(void *to, int j, float even, float odd, uint32_t add_even, uint32_t add_odd)
{
    ((u32_t *)to)[j] = (as_bits(even) + add_even) >> 16 | ((as_bits(odd) + add_odd) & UPPER);
}

/* To nearest; ties away from zero. */
INLINE void store_half_away(void *to, int j, float even, float odd)
{
    store_upper(to, j, even, odd, 0x8000, 0x8000);
}

INLINE void store_stochastic(void *to, int j, float even, float odd, uint32_t pair, uint32_t key)
{
    const random_t random = random_bits((pair + (uint32_t)j) ^ key);
    store_upper(to, j, even, odd, random.even, random.odd);
}

/* ---- The parameter ---- */

INLINE pair_t load_param(enum param kind, const block_t *b, int j)
{
    if (kind == PARAM_FP32)
        return load_fp32(b->p, j);
    if (kind == PARAM_NEAREST || kind == PARAM_STOCHASTIC)
        return load_bf16(b->p, j);
    const uint32_t upper = ((const u32_t *)b->p)[j];
    uint32_t lower;
    if (kind == PARAM_SPLIT)
        lower = ((const u32_t *)b->remainder)[j];
    else {
        lower = ((const u16_t *)b->remainder)[j]; /* of each byte, a half whose lower byte is zero */
        lower = (lower & 0xff) << 8 | (lower & 0xff00) << 16;
    }
    uint32_t even = (upper << 16) + ((lower & 0xffff) ^ 0x8000) - 0x8000; /* the lower half is signed */
    uint32_t odd = (upper & UPPER) + (uint32_t)((int32_t)lower >> 16);
    return (pair_t){as_float(even), as_float(odd)};
}

INLINE void store_param(enum param kind, const block_t *b, int j, float even, float odd)
{
    if (kind == PARAM_FP32)
        store_fp32(b->p, j, even, odd);
    else if (kind == PARAM_NEAREST)
        store_half_away(b->p, j, even, odd);
    else if (kind == PARAM_STOCHASTIC)
        store_stochastic(b->p, j, even, odd, b->pair, b->key_p);
    else if (kind == PARAM_SPLIT24) {
        const random_t random = random_bits((b->pair + (uint32_t)j) ^ b->key_p);
        const uint32_t first = as_bits(even) + (random.even >> 8), second = as_bits(odd) + (random.odd >> 8);
        ((u32_t *)b->p)[j] = (first + 0x8000) >> 16 | ((second + 0x8000) & UPPER);
        ((u16_t *)b->remainder)[j] = (uint16_t)((first >> 8 & 0xff) | (second & 0xff00));
    } else {
        store_half_away(b->p, j, even, odd);
        ((u32_t *)b->remainder)[j] = (as_bits(even) & 0xffff) | as_bits(odd) << 16;
    }
}

INLINE pair_t load_grad(enum param kind, const block_t *b, int j)
{
    return kind == PARAM_FP32 ? load_fp32(b->g, j) : load_bf16(b->g, j);
}

/* ---- Codes of 8 bits: codes.py says what they stand for ---- */

/* Magnitudes have the order of their bits, and NaN comes after them all. */
#define INFINITE 0x7f800000u
#define MAGNITUDE 0x7fffffffu

/* Of 2^32: how far apart the rounding thresholds of neighbours are. */
#define POSITION 0x85ebca6bu

/* Scales below it count as zero, so that their inverse is finite. */
#define SMALLEST_SCALE 0x1p-120f
#define SMALLEST_SCALE_BITS ((127 - 120) << 23)

/* Of the roots' codes, which are multiples of `grain`: the code of the block's scale; the unit of their steps, and the
   widest step in it. */
#define LARGEST(grain) (256 - 2 * (grain))
#define WIDTH_SHIFT 12
#define WIDEST 161

/* How far thresholds have walked from a block's first pair to its j-th; a table instead of slow multiplications. */
#define WALK1(j) (uint32_t)(j) * 2 * POSITION
#define WALK4(j) WALK1(j), WALK1(j + 1), WALK1(j + 2), WALK1(j + 3)
#define WALK16(j) WALK4(j), WALK4(j + 4), WALK4(j + 8), WALK4(j + 12)
#define WALK64(j) WALK16(j), WALK16(j + 16), WALK16(j + 32), WALK16(j + 48)
static const _Alignas(64) uint32_t WALKED[PAIRS] = {WALK64(0), WALK64(64)};

/* What a step is counted as, a little more than 2^16: however it is rounded, one step above zero is never zero. */
#define STEP 65536.015625f

/* How a block's codes are read: first moments by a factor, roots as the bits of fp32. */
typedef struct {
    float first;
    uint32_t bottom, step;
} decoding_t;

/* And how they are made: roots are numbers of steps, of 2^16. What a first moment's code stands for, times `ahead`, is
   added to the parameter. */
typedef struct {
    float first, step, ahead;
    uint32_t bottom;
} encoding_t;

typedef struct {
    struct constants c;
    float w1g, w2g; /* weights of the gradient and of its square, with the gradient's factor in them */
    float step_size; /* of the ratio: with what a code takes back */
} numbers_t;

INLINE uint32_t step_of(const block_t *b)
{
    return (as_bits(*b->m_scale) & 0xff) << WIDTH_SHIFT;
}

/* Of roots' codes; 2 where the lowest bit is the first moment's. */
INLINE uint32_t grain_of(const numbers_t *n)
{
    return n->c.has_ratios != 0 ? 1 : 2;
}

INLINE uint32_t bottom_of(const numbers_t *n, const block_t *b)
{
    return as_bits(*b->v_scale) - LARGEST(grain_of(n)) * step_of(b);
}

/* What the code 1 of a ratio stands for. */
INLINE float unit_of(const block_t *b)
{
    return *b->m_scale * (float)(1 / 127.0);
}

INLINE decoding_t decoding_of(const numbers_t *n, const block_t *b)
{
    return (decoding_t){unit_of(b), bottom_of(n, b), step_of(b)};
}

INLINE float inverse(float scale)
{
    return scale >= SMALLEST_SCALE ? 1.0f / scale : 0.0f;
}

INLINE encoding_t encoding_of(const numbers_t *n, const block_t *b)
{
    const uint32_t step = step_of(b);
    return (encoding_t){
        .first = inverse(*b->m_scale) * 127.0f,
        .step = step ? 1.0f / (float)step * STEP : 0.0f,
        .ahead = n->c.ahead * unit_of(b),
        .bottom = bottom_of(n, b),
    };
}

/* The sum's lowest bit stands for 1: it is rounded to an integer. */
#define TO_INTEGER 0x1.8p23f

typedef struct {
    uint32_t code;
    float value; /* in units */
} first_t;

INLINE first_t encode_first(float x)
{
    const float sum = x + TO_INTEGER;
    return (first_t){as_bits(sum) & 255, sum - TO_INTEGER};
}

INLINE float decode_root(uint32_t code, const decoding_t *d)
{
    return as_float(code ? d->bottom + code * d->step : 0);
}

/* `threshold`: in [0, 65536), of a step: what is added before rounding down. */
INLINE uint32_t encode_root(float x, const encoding_t *e, uint32_t threshold)
{
    const int32_t above = (int32_t)(as_bits(x) - e->bottom);
    return ((uint32_t)(int32_t)((float)(above < 0 ? 0 : above) * e->step) + threshold) >> 16;
}

/* ---- One element ---- */

typedef struct {
    float p, m, v;
} element_t;

/* torch.optim.AdamW's operations, in its order. */
INLINE element_t update_exactly(const numbers_t *n, int coupled, float p, float g, float m, float v)
{
    const struct constants *c = &n->c;
    g = g * c->gscale;
    if (coupled)
        g = g + c->l2 * p;
    p = p * c->decay;
    m = c->w1 < 0.5f ? m + c->w1 * (g - m) : g - (g - m) * (1.0f - c->w1);
    v = v * c->beta2;
    v = v + (c->w2 * g) * g;
    float denominator = sqrtf(v) / c->bc2_sqrt + c->eps;
    p = p + (-c->step_size * m) / denominator;
    return (element_t){p, m, v};
}

typedef struct {
    float m, v;
} moments_t;

/* New moments with fewer operations, where they are rounded anyway. */
INLINE moments_t update_moments(const numbers_t *n, int coupled, float p, float g, float m, float v)
{
    const struct constants *c = &n->c;
    if (coupled)
        g = g * c->gscale + c->l2 * p;
    return (moments_t){c->beta1 * m + n->w1g * g, c->beta2 * v + (n->w2g * g) * g};
}

/* For bf16 moments: eps and step size have the second moment's bias correction in them. */
INLINE element_t update_briefly(const numbers_t *n, int coupled, float p, float g, float m, float v)
{
    const struct constants *c = &n->c;
    const moments_t new = update_moments(n, coupled, p, g, m, v);
    p = p * c->decay - (c->step_size * new.m) / (sqrtf(new.v) + c->eps);
    return (element_t){p, new.m, new.v};
}

typedef struct {
    float p, ratio, root;
} coded_t;

/* Codes hold sqrt(v), and of m its ratio to sqrt(v) + eps. The parameter lacks what the ratio's new code adds. */
INLINE coded_t update_coded(const numbers_t *n, int coupled, float p, float g, float m, float root)
{
    const struct constants *c = &n->c;
    const moments_t new = update_moments(n, coupled, p, g, m, root * root);
    root = sqrtf(new.v);
    const float ratio = new.m / (root + c->eps);
    return (coded_t){p * c->decay - n->step_size * ratio, ratio, root};
}

/* ---- Blocks ---- */

/* fp32 moments: one element at a time, because their pairs would have to be taken apart and put together. */
INLINE void update_fp32(enum param param, int coupled, const numbers_t *n, const block_t *b, int numel)
{
    f32_t *m = (f32_t *)b->m, *v = (f32_t *)b->v, *p32 = (f32_t *)b->p;
    const f32_t *g32 = (const f32_t *)b->g;
    u16_t *p16 = (u16_t *)b->p, *lower = (u16_t *)b->remainder;
    int8_t *lower8 = (int8_t *)b->remainder;
    const u16_t *g16 = (const u16_t *)b->g;
#pragma omp simd
    for (int j = 0; j < numel; j++) {
        const float g = param == PARAM_FP32 ? g32[j] : as_float((uint32_t)g16[j] << 16);
        float p = param == PARAM_FP32 ? p32[j] : as_float((uint32_t)p16[j] << 16);
        if (param == PARAM_SPLIT)
            p = as_float(((uint32_t)p16[j] << 16) + ((uint32_t)lower[j] ^ 0x8000) - 0x8000);
        if (param == PARAM_SPLIT24)
            p = as_float(((uint32_t)p16[j] << 16) + (uint32_t)lower8[j] * 256);
        const element_t new = update_exactly(n, coupled, p, g, m[j], v[j]);
        m[j] = new.m;
        v[j] = new.v;
        if (param == PARAM_FP32) {
            p32[j] = new.p;
            continue;
        }
        /* A GPU's NaN has all bits set: rounding would carry into its sign. */
        uint32_t bits = new.p == new.p ? as_bits(new.p) : 0x7fc00000, random = 0;
        if (param == PARAM_STOCHASTIC || param == PARAM_SPLIT24) {
            const random_t of_pair = random_bits((b->pair + (uint32_t)j / 2) ^ b->key_p);
            random = j % 2 ? of_pair.odd : of_pair.even;
        }
        if (param == PARAM_SPLIT24)
            bits += random >> 8;
        p16[j] = (uint16_t)((bits + (param == PARAM_STOCHASTIC ? random : 0x8000)) >> 16);
        if (param == PARAM_SPLIT)
            lower[j] = (uint16_t)bits;
        if (param == PARAM_SPLIT24)
            lower8[j] = (int8_t)(bits >> 8);
    }
}

/* bf16 moments: every array of a bf16 parameter is made of pairs. */
INLINE void update_bf16(enum param param, int coupled, const numbers_t *n, const block_t *b, int pairs)
{
#pragma omp simd
    for (int j = 0; j < pairs; j++) {
        const pair_t p = load_param(param, b, j), g = load_grad(param, b, j);
        const pair_t m = load_bf16(b->m, j), v = load_bf16(b->v, j);
        const element_t even = update_briefly(n, coupled, p.even, g.even, m.even, v.even);
        const element_t odd = update_briefly(n, coupled, p.odd, g.odd, m.odd, v.odd);
        store_half_away(b->m, j, even.m, odd.m);
        store_stochastic(b->v, j, even.v, odd.v, b->pair, b->key_v);
        store_param(param, b, j, even.p, odd.p);
    }
}

INLINE uint32_t larger(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

INLINE uint32_t smaller(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

/* The bits of a magnitude; 0 where it is infinite or NaN. */
INLINE uint32_t finite_bits(float x)
{
    const uint32_t bits = as_bits(x) & MAGNITUDE;
    return bits < INFINITE ? bits : 0;
}

INLINE float finite_or(float x, float otherwise)
{
    return (as_bits(x) & MAGNITUDE) < INFINITE ? x : otherwise;
}

/* Codes need the block's new scales first, and parameters the codes: the new numbers wait in fp32, 3 KiB that stay in
   the nearest cache. Of the first moment, that is m before the update, and after it what is going to be encoded. */
typedef struct {
    _Alignas(64) float first_even[PAIRS], first_odd[PAIRS], root_even[PAIRS], root_odd[PAIRS], p_even[PAIRS],
        p_odd[PAIRS];
} waiting_t;

/* Roots but zero are as large as the least code but zero. */
static void raise_roots(uint32_t lowest, waiting_t *w)
{
    for (int j = 0; j < PAIRS; j++) {
        const uint32_t even = as_bits(w->root_even[j]), odd = as_bits(w->root_odd[j]);
        w->root_even[j] = as_float(even ? larger(even, lowest) : 0);
        w->root_odd[j] = as_float(odd ? larger(odd, lowest) : 0);
    }
}

/* The scales of a block, out of bits; `least`: of all roots but zero. */
INLINE void store_scales(const numbers_t *n, const block_t *b, uint32_t largest_first, uint32_t top, uint32_t least,
                         waiting_t *w)
{
    const uint32_t grain = grain_of(n), largest = LARGEST(grain);
    const uint32_t one = (largest - 2 * grain) << WIDTH_SHIFT, most = (top - 1) / (largest << WIDTH_SHIFT);
    const uint32_t before = as_bits(*b->m_scale) & 0xff;
    uint32_t width = (top - least + one - 1) / one;
    width = width < 1 ? 1 : width > WIDEST ? WIDEST : width;
    if (width <= before && 8 * width + 7 >= 7 * before)
        width = before;
    width = top < SMALLEST_SCALE_BITS ? 0 : width > most ? most : width;
    const uint32_t step = width << WIDTH_SHIFT, multiple = grain * step;
    if (width)
        top = (top + multiple - 1) / multiple * multiple;
    *b->m_scale = as_float((largest_first & ~0xffu) | width);
    *b->v_scale = as_float(top);
    const uint32_t lowest = top - (largest - grain) * step;
    if (width && lowest > least)
        raise_roots(lowest, w);
}

/* The least bits of a block's roots, passing over zero and what is not finite. */
static uint32_t least_but_zero(const waiting_t *w)
{
    uint32_t below = UINT32_MAX;
    for (int j = 0; j < PAIRS; j++)
        below = smaller(below, smaller(finite_bits(w->root_even[j]) - 1, finite_bits(w->root_odd[j]) - 1));
    return below + 1;
}

/* The scales of a block in which something is not finite, which is replaced by what is encoded in its stead. */
static void scale_what_is_finite(const numbers_t *n, const block_t *b, waiting_t *w)
{
    uint32_t first = 0, top = 0;
    for (int j = 0; j < PAIRS; j++) {
        first = larger(first, larger(finite_bits(w->first_even[j]), finite_bits(w->first_odd[j])));
        top = larger(top, larger(finite_bits(w->root_even[j]), finite_bits(w->root_odd[j])));
    }
    for (int j = 0; j < PAIRS; j++) {
        w->first_even[j] = finite_or(w->first_even[j], 0);
        w->first_odd[j] = finite_or(w->first_odd[j], 0);
    }
    store_scales(n, b, first, top, least_but_zero(w), w);
    for (int j = 0; j < PAIRS; j++) {
        w->root_even[j] = finite_or(w->root_even[j], *b->v_scale);
        w->root_odd[j] = finite_or(w->root_odd[j], *b->v_scale);
    }
}

/* Where codes are no ratios, first moments have 9 bits, the lowest in the byte of the root. */

INLINE float decode_moment(uint32_t code, float scale)
{
    const float x = (float)((int32_t)(code << 23) >> 23) * (float)(1 / 255.0);
    return x * fabsf(x) * scale;
}

INLINE void decode_moments(const numbers_t *n, const block_t *b, waiting_t *w)
{
    const decoding_t old = decoding_of(n, b);
    const float scale = *b->m_scale;
#pragma omp simd
    for (int j = 0; j < PAIRS; j++) {
        const uint32_t m = ((const u16_t *)b->m)[j], v = ((const u16_t *)b->v)[j];
        w->root_even[j] = decode_root(v & 254, &old);
        w->root_odd[j] = decode_root(v >> 8 & 254, &old);
        w->first_even[j] = decode_moment((m & 255) << 1 | (v & 1), scale);
        w->first_odd[j] = decode_moment(m >> 8 << 1 | (v >> 8 & 1), scale);
    }
}

/* `share`: of the largest. */
INLINE uint32_t encode_moment(float share)
{
    return as_bits(copysignf(sqrtf(fabsf(share)), share) * 255.0f + TO_INTEGER) & 511;
}

INLINE void encode_moments(enum param param, const numbers_t *n, const block_t *b, const waiting_t *w)
{
    const encoding_t new = encoding_of(n, b);
    const float share = inverse(*b->m_scale);
    const uint32_t first = 2 * b->pair * POSITION + b->key_v;
#pragma omp simd
    for (int j = 0; j < PAIRS; j++) {
        const uint32_t even = first + WALKED[j], odd = even + POSITION;
        const uint32_t m_even = encode_moment(w->first_even[j] * share);
        const uint32_t m_odd = encode_moment(w->first_odd[j] * share);
        const uint32_t v_even = encode_root(w->root_even[j], &new, even >> 16 << 1) & 254;
        const uint32_t v_odd = encode_root(w->root_odd[j], &new, odd >> 16 << 1) & 254;
        ((u16_t *)b->m)[j] = (uint16_t)(m_even >> 1 | m_odd >> 1 << 8);
        ((u16_t *)b->v)[j] = (uint16_t)(v_even | (m_even & 1) | (v_odd | (m_odd & 1)) << 8);
        store_param(param, b, j, w->p_even[j], w->p_odd[j]);
    }
}

INLINE void decode_block(const numbers_t *n, const block_t *b, waiting_t *w)
{
    if (n->c.has_ratios == 0) {
        decode_moments(n, b, w);
        return;
    }
    const decoding_t old = decoding_of(n, b);
    const float eps = n->c.eps_before;
#pragma omp simd
    for (int j = 0; j < PAIRS; j++) {
        const uint32_t m = ((const u16_t *)b->m)[j], v = ((const u16_t *)b->v)[j];
        w->root_even[j] = decode_root(v & 255, &old);
        w->root_odd[j] = decode_root(v >> 8, &old);
        w->first_even[j] = (float)((int32_t)(m << 24) >> 24) * old.first * (w->root_even[j] + eps);
        w->first_odd[j] = (float)((int32_t)(m << 16) >> 24) * old.first * (w->root_odd[j] + eps);
    }
}

/* First moments again, out of ratios; returns the largest one's bits. */
static uint32_t moments_of_ratios(float eps, waiting_t *w)
{
    uint32_t bits = 0;
    for (int j = 0; j < PAIRS; j++) {
        w->first_even[j] *= w->root_even[j] + eps;
        w->first_odd[j] *= w->root_odd[j] + eps;
        bits = larger(bits, larger(as_bits(w->first_even[j]) & MAGNITUDE, as_bits(w->first_odd[j]) & MAGNITUDE));
    }
    return bits;
}

/* All of a block but its codes and, for which they are needed, its parameters. */
INLINE void update_coded_block(enum param param, int coupled, const numbers_t *n, const block_t *b, waiting_t *w)
{
    uint32_t largest_first = 0, top = 0, least = UINT32_MAX;
    decode_block(n, b, w);
#pragma omp simd reduction(max : largest_first, top) reduction(min : least)
    for (int j = 0; j < PAIRS; j++) {
        const pair_t p = load_param(param, b, j), g = load_grad(param, b, j);
        const coded_t even = update_coded(n, coupled, p.even, g.even, w->first_even[j], w->root_even[j]);
        const coded_t odd = update_coded(n, coupled, p.odd, g.odd, w->first_odd[j], w->root_odd[j]);
        largest_first = larger(largest_first, larger(as_bits(even.ratio) & MAGNITUDE, as_bits(odd.ratio) & MAGNITUDE));
        top = larger(top, larger(as_bits(even.root), as_bits(odd.root)));
        least = smaller(least, smaller(as_bits(even.root), as_bits(odd.root)));
        w->first_even[j] = even.ratio;
        w->first_odd[j] = odd.ratio;
        w->root_even[j] = even.root;
        w->root_odd[j] = odd.root;
        w->p_even[j] = even.p;
        w->p_odd[j] = odd.p;
    }
    if (n->c.has_ratios == 0)
        largest_first = moments_of_ratios(n->c.eps, w);
    if (larger(largest_first, top) >= INFINITE)
        scale_what_is_finite(n, b, w);
    else
        store_scales(n, b, largest_first, top, least || !top ? least : least_but_zero(w), w);
}

INLINE void encode_block(enum param param, const numbers_t *n, const block_t *b, const waiting_t *w)
{
    if (n->c.has_ratios == 0) {
        encode_moments(param, n, b, w);
        return;
    }
    const encoding_t new = encoding_of(n, b);
    const uint32_t first_even = 2 * b->pair * POSITION + b->key_v, first_odd = first_even + POSITION;
#pragma omp simd
    for (int j = 0; j < PAIRS; j++) {
        const uint32_t even = first_even + WALKED[j], odd = first_odd + WALKED[j];
        const first_t m_even = encode_first(w->first_even[j] * new.first);
        const first_t m_odd = encode_first(w->first_odd[j] * new.first);
        ((u16_t *)b->m)[j] = (uint16_t)(m_even.code | m_odd.code << 8);
        ((u16_t *)b->v)[j] = (uint16_t)(encode_root(w->root_even[j], &new, even >> 16) |
                                        encode_root(w->root_odd[j], &new, odd >> 16) << 8);
        store_param(param, b, j, w->p_even[j] + new.ahead * m_even.value, w->p_odd[j] + new.ahead * m_odd.value);
    }
}

INLINE int param_bytes(enum param param)
{
    return param == PARAM_FP32 ? 4 : 2;
}

INLINE int remainder_bytes(enum param param)
{
    return param == PARAM_SPLIT ? 2 : param == PARAM_SPLIT24 ? 1 : 0;
}

INLINE int state_bytes(enum state state)
{
    return state == STATE_FP32 ? 4 : state == STATE_BF16 ? 2 : 1;
}

typedef void update_blocks(const numbers_t *n, const block_t *first, int64_t blocks);

INLINE void update_all(enum param param, enum state state, int coupled, const numbers_t *n, const block_t *first,
                       int64_t blocks)
{
    const numbers_t numbers = *n;
    block_t b = *first;
    if (state == STATE_FP32) {
        update_fp32(param, coupled, &numbers, &b, (int)blocks * BLOCK);
        return;
    }
    if (state == STATE_BF16) {
        update_bf16(param, coupled, &numbers, &b, (int)blocks * PAIRS);
        return;
    }
    /* A block is encoded while the next one is computed: its scales, a chain of reductions, are not waited for. */
    waiting_t waiting[2];
    block_t before = b;
    for (int64_t i = 0; i < blocks; i++) {
        update_coded_block(param, coupled, &numbers, &b, &waiting[i % 2]);
        if (i > 0)
            encode_block(param, &numbers, &before, &waiting[(i - 1) % 2]);
        before = b;
        b.p += BLOCK * param_bytes(param);
        b.g += BLOCK * param_bytes(param);
        b.m += BLOCK * state_bytes(state);
        b.v += BLOCK * state_bytes(state);
        b.m_scale++;
        b.v_scale++;
        if (remainder_bytes(param))
            b.remainder += BLOCK * remainder_bytes(param);
        b.pair += PAIRS;
    }
    if (blocks > 0)
        encode_block(param, &numbers, &before, &waiting[(blocks - 1) % 2]);
}

/* One function for each kind. */
#define DEFINE(param, state)                                                                                       \
    static void update_##param##_##state(const numbers_t *n, const block_t *b, int64_t blocks)                     \
    {                                                                                                              \
        update_all(PARAM_##param, STATE_##state, 0, n, b, blocks);                                                 \
    }                                                                                                              \
    static void update_##param##_##state##_coupled(const numbers_t *n, const block_t *b, int64_t blocks)           \
    {                                                                                                              \
        update_all(PARAM_##param, STATE_##state, 1, n, b, blocks);                                                 \
    }
#define FOR_STATES(DO, param) DO(param, FP32) DO(param, BF16) DO(param, INT8)
#define FOR_ALL(DO)                                                                                                \
    FOR_STATES(DO, FP32) FOR_STATES(DO, NEAREST) FOR_STATES(DO, STOCHASTIC) FOR_STATES(DO, SPLIT)                  \
    FOR_STATES(DO, SPLIT24)
#define NAME(param, state) update_##param##_##state, update_##param##_##state##_coupled,

FOR_ALL(DEFINE)

static update_blocks *const KERNELS[KINDS] = {FOR_ALL(NAME)};

/* A short block: in a copy that is padded with zeros. */
static void update_short(update_blocks *kernel, const numbers_t *n, const block_t *b, size_t numel, size_t p_bytes,
                         size_t m_bytes, size_t remainder_bytes)
{
    unsigned char p[BLOCK * 4] = {0}, g[BLOCK * 4] = {0}, m[BLOCK * 4] = {0}, v[BLOCK * 4] = {0};
    unsigned char remainder[BLOCK * 2] = {0};
    block_t copy = *b;
    copy.p = memcpy(p, b->p, numel * p_bytes);
    copy.g = memcpy(g, b->g, numel * p_bytes);
    copy.m = memcpy(m, b->m, numel * m_bytes);
    copy.v = memcpy(v, b->v, numel * m_bytes);
    if (b->remainder)
        copy.remainder = memcpy(remainder, b->remainder, numel * remainder_bytes);
    kernel(n, &copy, 1);
    memcpy(b->p, p, numel * p_bytes);
    memcpy(b->m, m, numel * m_bytes);
    memcpy(b->v, v, numel * m_bytes);
    if (b->remainder)
        memcpy(b->remainder, remainder, numel * remainder_bytes);
}

/* update_range for this instruction set. */
void JOIN(offload_update_, ISA)(const struct tensor *t, const struct constants *c, int64_t begin, int64_t end);
void JOIN(offload_update_, ISA)(const struct tensor *t, const struct constants *c, int64_t begin, int64_t end)
{
    const int coupled = t->kind % 2;
    const enum param param = (enum param)(t->kind / (2 * STATES));
    const enum state state = (enum state)(t->kind / 2 % STATES);
    const int p_bytes = param_bytes(param), m_bytes = state_bytes(state), r_bytes = remainder_bytes(param);
    const int coded = state == STATE_INT8;
    numbers_t n = {*c, c->w1, c->w2, c->step_size + c->ahead};
    if (!coupled) {
        n.w1g = c->w1 * c->gscale;
        n.w2g = (c->w2 * c->gscale) * c->gscale;
    }
    block_t b = {
        .p = (unsigned char *)(uintptr_t)t->param + begin * p_bytes,
        .g = (unsigned char *)(uintptr_t)t->grad + begin * p_bytes,
        .m = (unsigned char *)(uintptr_t)t->exp_avg + begin * m_bytes,
        .v = (unsigned char *)(uintptr_t)t->exp_avg_sq + begin * m_bytes,
        .remainder = r_bytes ? (unsigned char *)(uintptr_t)t->remainder + begin * r_bytes : 0,
        .m_scale = coded ? (f32_t *)(uintptr_t)t->exp_avg_scale + begin / BLOCK : 0,
        .v_scale = coded ? (f32_t *)(uintptr_t)t->exp_avg_sq_scale + begin / BLOCK : 0,
        .pair = (uint32_t)((uint64_t)(t->start + begin) / 2),
        .key_p = (uint32_t)t->key_param,
        .key_v = (uint32_t)t->key_v,
    };
    const int64_t blocks = (end - begin) / BLOCK, rest = (end - begin) % BLOCK;
    KERNELS[t->kind](&n, &b, blocks);
    if (!rest)
        return;
    b.p += blocks * BLOCK * p_bytes;
    b.g += blocks * BLOCK * p_bytes;
    b.m += blocks * BLOCK * m_bytes;
    b.v += blocks * BLOCK * m_bytes;
    if (r_bytes)
        b.remainder += blocks * BLOCK * r_bytes;
    if (coded) {
        b.m_scale += blocks;
        b.v_scale += blocks;
    }
    b.pair += (uint32_t)(blocks * PAIRS);
    update_short(KERNELS[t->kind], &n, &b, (size_t)rest, (size_t)p_bytes, (size_t)m_bytes, (size_t)r_bytes);
}
