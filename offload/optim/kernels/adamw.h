/* The packed AdamW on the CPU: what the files of this folder share, and the rows that cpu.py fills.
 *
 * The arithmetic and the formats are those of offload/optim/reference.py and formats.py, bit for bit.
 */
#ifndef OFFLOAD_ADAMW_H
#define OFFLOAD_ADAMW_H

#include <stdatomic.h>
#include <stdint.h>

/* Number of this interface; cpu.py refuses a library of another. */
#define OFFLOAD_ABI 5

/* Elements that share a scale, and the unit in which tensors are updated. */
#define BLOCK 256

/* How a parameter, and how its moments are stored: formats.PARAM_KINDS and STATE_DTYPES, in their order. */
enum param { PARAM_FP32, PARAM_NEAREST, PARAM_STOCHASTIC, PARAM_SPLIT, PARAM_SPLIT24 };
enum state { STATE_FP32, STATE_BF16, STATE_INT8 };

#define STATES 3

/* (param * STATES + state) * 2 + coupled */
#define KINDS 30

/* One tensor of a call: addresses (of any alignment), and numbers. */
struct tensor {
    int64_t param, grad;           /* [numel] fp32 or bf16 */
    int64_t exp_avg, exp_avg_sq;   /* [numel] fp32, bf16, or codes of 8 bits */
    int64_t exp_avg_scale;         /* [ceil(numel / BLOCK)] fp32, for codes, else 0 */
    int64_t exp_avg_sq_scale;
    int64_t remainder;             /* [numel] int16 for PARAM_SPLIT, int8 for PARAM_SPLIT24, else 0 */
    int64_t numel;
    int64_t start;                 /* position of the first element in its parameter, a multiple of BLOCK */
    int64_t key_param, key_v;      /* of the random bits, or of the rounding thresholds of codes: uint32 */
    int64_t kind;
    int64_t constants;             /* which row of constants */
};

/* formats.Constants */
struct constants {
    float gscale, l2, decay, beta1, w1, beta2, w2, eps, step_size, bc2_sqrt, eps_before,
        has_ratios, ahead;
};

/* Updates elements [begin, end) of a tensor; begin is a multiple of BLOCK, end is one or the tensor's end. */
typedef void update_range(const struct tensor *t, const struct constants *c, int64_t begin, int64_t end);

/* Ranges of [0, blocks) that threads take until there are none left: long ones first, because each begins by waiting
   for the memory, short ones at the end, so that all threads end together. */
struct ranges {
    int64_t blocks;
    int32_t threads;
    atomic_int_least64_t taken;
};

/* No range is shorter, but for the last one: about 20 microseconds of work. */
#define SHORTEST_RANGE ((1 << 16) / BLOCK)

/* Takes the next range, [*begin, *end); 0 when there is none. */
int offload_take_range(struct ranges *ranges, int64_t *begin, int64_t *end);

/* Runs work(job) on the calling thread and on up to `threads - 1` others at once; returns when all have returned.
   Another call that is under way keeps the others busy: then the caller works alone. */
void offload_pool_run(int threads, void (*work)(void *job), void *job);

#endif
