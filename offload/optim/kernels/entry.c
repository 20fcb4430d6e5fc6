/* The library's functions: raw pointers and sizes, no Python and no torch. */
#include <fenv.h>
#include <stddef.h>
#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "adamw.h"

#define EXPORT __attribute__((visibility("default")))

/* A call of fewer blocks is not worth waking a thread for. */
#define SMALL_CALL (2 * SHORTEST_RANGE)

/* ---- Instruction sets ---- */

update_range offload_update_baseline;
#ifdef WITH_V3
update_range offload_update_v3;
#endif
#ifdef WITH_V4
update_range offload_update_v4;
#endif

struct isa {
    const char *name;
    update_range *update;
};

/* Of those compiled in, the one at a position among those that this CPU has, best first; no name past the last. */
static struct isa find_isa(int32_t position)
{
    struct isa found[3] = {{0, 0}, {0, 0}, {0, 0}};
    int count = 0;
    /* Processors with these have the rest of their level too. */
#ifdef WITH_V4
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        found[count++] = (struct isa){"x86-64-v4", offload_update_v4};
#endif
#ifdef WITH_V3
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))
        found[count++] = (struct isa){"x86-64-v3", offload_update_v3};
#endif
    found[count++] = (struct isa){"baseline", offload_update_baseline};
    return position >= 0 && position < count ? found[position] : (struct isa){0, 0};
}

/* The name of an instruction set by its position, best first; null past the last. */
EXPORT const char *offload_isa(int32_t position)
{
    return find_isa(position).name;
}

EXPORT int32_t offload_abi(void)
{
    return OFFLOAD_ABI;
}

/* ---- The update ---- */

struct job {
    const struct tensor *tensors;
    const struct constants *constants;
    update_range *update;
    struct ranges ranges; /* of blocks, which are numbered over all tensors */
};

static int64_t blocks_of(const struct tensor *t)
{
    return (t->numel + BLOCK - 1) / BLOCK;
}

static void work(void *argument)
{
    struct job *job = argument;
    const struct tensor *t = job->tensors;
    int64_t first = 0; /* number of t's first block */
    int64_t begin, end;
    fenv_t before;
    fegetenv(&before);
    fesetenv(FE_DFL_ENV); /* the caller may round otherwise, or flush subnormals to zero */
    while (offload_take_range(&job->ranges, &begin, &end))
        while (begin < end) {
            while (begin >= first + blocks_of(t))
                first += blocks_of(t++);
            const int64_t after = first + blocks_of(t), last = end < after ? end : after;
            const int64_t numel = last == after ? t->numel : (last - first) * BLOCK;
            job->update(t, job->constants + t->constants, (begin - first) * BLOCK, numel);
            begin = last;
        }
    fesetenv(&before);
}

static int is_valid(const struct tensor *t, int64_t rows)
{
    if (t->kind < 0 || t->kind >= KINDS || t->numel < 0 || t->start < 0 || t->start % BLOCK)
        return 0;
    if (t->constants < 0 || t->constants >= rows)
        return 0;
    if (!t->numel)
        return 1;
    const int coded = t->kind / 2 % STATES == STATE_INT8, split = t->kind / (2 * STATES) >= PARAM_SPLIT;
    return t->param && t->grad && t->exp_avg && t->exp_avg_sq && (!split || t->remainder) &&
           (!coded || (t->exp_avg_scale && t->exp_avg_sq_scale));
}

/* Updates tensors, no two of which overlap, on up to `threads` threads with the instruction set at a position.
   Returns 0; -1 where the CPU lacks the instruction set; or the number, from 1, of the first tensor whose row is
   invalid, before anything has been written. */
EXPORT int64_t offload_adamw(const struct tensor *tensors, int64_t count, const struct constants *constants,
                             int64_t rows, int32_t threads, int32_t isa)
{
    struct job job = {.tensors = tensors, .constants = constants, .update = find_isa(isa).update};
    int64_t blocks = 0;
    if (!job.update)
        return -1;
    for (int64_t i = 0; i < count; i++) {
        if (!is_valid(tensors + i, rows))
            return i + 1;
        blocks += blocks_of(tensors + i);
    }
    if (blocks < SMALL_CALL || threads < 1)
        threads = 1;
    if (threads > blocks / SHORTEST_RANGE + 1)
        threads = (int32_t)(blocks / SHORTEST_RANGE + 1);
    job.ranges.blocks = blocks;
    job.ranges.threads = threads;
    offload_pool_run(threads, work, &job);
    return 0;
}

/* ---- Memory ---- */

/* Asks for huge pages under the whole pages of a range; whether the system took the advice. */
EXPORT int32_t offload_advise_huge_pages(void *address, int64_t nbytes)
{
#ifdef MADV_HUGEPAGE
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    const uintptr_t begin = ((uintptr_t)address + page - 1) / page * page;
    const uintptr_t end = ((uintptr_t)address + (uintptr_t)nbytes) / page * page;
    return begin < end && !madvise((void *)begin, end - begin, MADV_HUGEPAGE);
#else
    (void)address;
    (void)nbytes;
    return 0;
#endif
}
