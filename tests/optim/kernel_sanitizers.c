/* Runs every loop of the kernel over arrays that are allocated to the byte, at any address, full of random bits:
 * infinities, NaN and subnormals among them. Built under sanitizers by test_kernel_sanitizers.py, which looks at
 * what they say; what the loops compute is for test_cpu_kernel.py.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "adamw.h"

int32_t offload_abi(void);
const char *offload_isa(int32_t position);
int64_t offload_adamw(const struct tensor *, int64_t, const struct constants *, int64_t, int32_t, int32_t);
int32_t offload_advise_huge_pages(void *, int64_t);

#define ARRAYS 7 /* the addresses at the head of struct tensor */

static _Thread_local uint64_t random_state = 1;

static uint64_t next_random(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

/* An array that ends where its allocation ends, `offset` bytes behind where the allocation begins. */
static int64_t new_array(size_t nbytes, size_t offset, void **allocation)
{
    unsigned char *bytes = *allocation = malloc(nbytes + offset);
    for (size_t i = 0; i < nbytes; i++)
        bytes[offset + i] = (unsigned char)(next_random() >> 32);
    return (int64_t)(uintptr_t)(bytes + offset);
}

static struct tensor new_tensor(int64_t kind, int64_t numel, size_t offset, void *allocations[ARRAYS])
{
    const size_t n = (size_t)numel, blocks = (n + BLOCK - 1) / BLOCK;
    const int64_t param = kind / (2 * STATES), state = kind / 2 % STATES;
    const size_t p_bytes = param == PARAM_FP32 ? 4 : 2, m_bytes = state == STATE_FP32 ? 4 : state == STATE_BF16 ? 2 : 1;
    const size_t r_bytes = param == PARAM_SPLIT ? 2 : param == PARAM_SPLIT24 ? 1 : 0;
    const int coded = state == STATE_INT8;
    memset(allocations, 0, ARRAYS * sizeof *allocations);
    return (struct tensor){
        .param = new_array(n * p_bytes, offset, &allocations[0]),
        .grad = new_array(n * p_bytes, offset, &allocations[1]),
        .exp_avg = new_array(n * m_bytes, offset, &allocations[2]),
        .exp_avg_sq = new_array(n * m_bytes, offset, &allocations[3]),
        .exp_avg_scale = coded ? new_array(blocks * 4, offset, &allocations[4]) : 0,
        .exp_avg_sq_scale = coded ? new_array(blocks * 4, offset, &allocations[5]) : 0,
        .remainder = r_bytes ? new_array(n * r_bytes, offset, &allocations[6]) : 0,
        .numel = numel,
        .start = (int64_t)(next_random() % 4) << 30,
        .key_param = (uint32_t)next_random(),
        .key_v = (uint32_t)next_random(),
        .kind = kind,
        .constants = kind % 2,
    };
}

static const struct constants ROWS[2] = {
    {0.5f, 0.0f, 0.999f, 0.9f, 0.1f, 0.999f, 0.001f, 1e-8f, 1e-3f, 0.5f, 2e-8f, 1.0f, 6e-3f},
    {-3.0f, 0.1f, 1.0f, 0.1f, 0.9f, 0.0f, 1.0f, 0.0f, 1e30f, 1e-30f, 0.0f, 0.0f, 0.0f},
};

/* One call for every kind and size; `extra` elements more make the call large enough for threads. */
static void update_all_kinds(int32_t isa, size_t offset, int64_t extra, int32_t threads)
{
    static const int64_t SIZES[] = {0, 1, 2, 3, 255, 256, 257, 777};
    enum { COUNT = KINDS * (sizeof SIZES / sizeof *SIZES) };
    struct tensor *tensors = malloc(COUNT * sizeof *tensors);
    void *(*allocations)[ARRAYS] = malloc(COUNT * sizeof *allocations);
    for (int i = 0; i < COUNT; i++)
        tensors[i] = new_tensor(i % KINDS, SIZES[i / KINDS] + extra, offset, allocations[i]);
    for (int step = 0; step < 2; step++)
        if (offload_adamw(tensors, COUNT, ROWS, 2, threads, isa))
            abort();
    for (int i = 0; i < COUNT; i++)
        for (int j = 0; j < ARRAYS; j++)
            free(allocations[i][j]);
    free(allocations);
    free(tensors);
}

static void *caller(void *number)
{
    random_state = 1 + (uint64_t)(uintptr_t)number;
    for (int i = 0; i < 3; i++)
        update_all_kinds(0, (size_t)i, 1024, 4);
    return number;
}

/* Boundaries of ranges, in one large tensor of each kind of moments. */
static void update_large(int32_t threads)
{
    struct tensor tensors[STATES];
    void *allocations[STATES][ARRAYS];
    const int64_t numel = 2 * SHORTEST_RANGE * BLOCK + 301;
    for (int state = 0; state < STATES; state++)
        tensors[state] = new_tensor((PARAM_SPLIT * STATES + state) * 2, numel, 1, allocations[state]);
    if (offload_adamw(tensors, STATES, ROWS, 2, threads, 0))
        abort();
    for (int state = 0; state < STATES; state++)
        for (int j = 0; j < ARRAYS; j++)
            free(allocations[state][j]);
}

static void refuse_invalid_rows(void)
{
    void *allocations[ARRAYS];
    struct tensor good = new_tensor((PARAM_SPLIT * STATES + STATE_INT8) * 2, 5, 0, allocations), rows[2] = {good, good};
    int64_t *fields[] = {&rows[1].param,        &rows[1].grad,      &rows[1].exp_avg, &rows[1].exp_avg_sq,
                         &rows[1].exp_avg_scale, &rows[1].remainder, &rows[1].kind,    &rows[1].numel,
                         &rows[1].start,         &rows[1].constants};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        rows[1] = good;
        *fields[i] = i < 6 ? 0 : -1;
        if (offload_adamw(rows, 2, ROWS, 2, 1, 0) != 2)
            abort();
    }
    if (offload_adamw(&good, 1, ROWS, 2, 1, 99) != -1 || offload_adamw(&good, 1, ROWS, 2, 1, -1) != -1)
        abort();
    if (offload_adamw(0, 0, 0, 0, 2, 0))
        abort();
    for (int j = 0; j < ARRAYS; j++)
        free(allocations[j]);
}

int main(void)
{
    for (int32_t isa = 0; offload_isa(isa); isa++)
        for (size_t offset = 0; offset < 4; offset++)
            update_all_kinds(isa, offset, 0, 1);
    refuse_invalid_rows();
    for (int32_t threads = 1; threads <= 7; threads += 3)
        update_large(threads);
    pthread_t callers[3];
    for (uintptr_t i = 0; i < 3; i++)
        pthread_create(&callers[i], 0, caller, (void *)i);
    for (int i = 0; i < 3; i++)
        pthread_join(callers[i], 0);
    void *pages = malloc(5 << 20);
    offload_advise_huge_pages((char *)pages + 1, (5 << 20) - 1);
    free(pages);
    printf("abi %d, best instruction set %s\n", (int)offload_abi(), offload_isa(0));
    return 0;
}
