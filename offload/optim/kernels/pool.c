/* A team of threads that waits for work: the callers of one process share it.
 *
 * A call is not held up by threads that have not woken: what they would have done, the others do, and the call
 * returns as soon as no thread is inside work(). Threads sleep between calls and die with the process.
 */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>

#include "adamw.h"

/* No range is longer, so that a thread that is held up has little left to do. */
#define LONGEST_RANGE ((1 << 20) / BLOCK)

/* Looks at a counter before going to sleep; some microseconds, about what it takes to wake up. */
#define SPINS 2000

static struct {
    pthread_mutex_t call; /* held by the one caller that has the team */
    pthread_mutex_t lock; /* guards what follows */
    pthread_cond_t work_wanted, work_done;
    int threads;       /* how many exist */
    int seats;         /* how many of them may still join the job */
    atomic_int active; /* how many are inside it */
    void (*work)(void *);
    void *job;
} pool = {
    .call = PTHREAD_MUTEX_INITIALIZER,
    .lock = PTHREAD_MUTEX_INITIALIZER,
    .work_wanted = PTHREAD_COND_INITIALIZER,
    .work_done = PTHREAD_COND_INITIALIZER,
};

static void *thread_main(void *unused)
{
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        while (!pool.seats)
            pthread_cond_wait(&pool.work_wanted, &pool.lock);
        pool.seats--;
        pool.active++;
        pthread_mutex_unlock(&pool.lock);
        pool.work(pool.job);
        pthread_mutex_lock(&pool.lock);
        if (--pool.active == 0)
            pthread_cond_signal(&pool.work_done);
    }
    return unused;
}

/* Threads do not survive fork(): the child starts with none, whatever the parent's were doing. */
static void forget_threads(void)
{
    pthread_mutex_init(&pool.call, 0);
    pthread_mutex_init(&pool.lock, 0);
    pthread_cond_init(&pool.work_wanted, 0);
    pthread_cond_init(&pool.work_done, 0);
    pool.threads = pool.seats = 0;
    pool.active = 0;
}

static void watch_forks(void)
{
    pthread_atfork(0, 0, forget_threads);
}

/* Starts threads until there are `wanted`, or until the system refuses. The lock is held. */
static void start_threads(int wanted)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    if (pool.threads >= wanted)
        return;
    sigset_t all, before; /* signals are for the program's own threads */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_t detached;
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    pthread_t thread;
    while (pool.threads < wanted && !pthread_create(&thread, &detached, thread_main, 0))
        pool.threads++;
    pthread_attr_destroy(&detached);
    pthread_sigmask(SIG_SETMASK, &before, 0);
}

int offload_take_range(struct ranges *r, int64_t *begin, int64_t *end)
{
    int64_t length, taken = atomic_load_explicit(&r->taken, memory_order_relaxed);
    do {
        const int64_t left = r->blocks - taken;
        if (left <= 0)
            return 0;
        length = left / (2 * r->threads);
        length = length < SHORTEST_RANGE ? SHORTEST_RANGE : length > LONGEST_RANGE ? LONGEST_RANGE : length;
        length = length < left ? length : left;
    } while (!atomic_compare_exchange_weak_explicit(&r->taken, &taken, taken + length, memory_order_relaxed,
                                                    memory_order_relaxed));
    *begin = taken;
    *end = taken + length;
    return 1;
}

void offload_pool_run(int threads, void (*work)(void *job), void *job)
{
    if (threads <= 1 || pthread_mutex_trylock(&pool.call)) {
        work(job);
        return;
    }
    pthread_mutex_lock(&pool.lock);
    start_threads(threads - 1);
    pool.work = work;
    pool.job = job;
    pool.seats = pool.threads < threads - 1 ? pool.threads : threads - 1;
    if (pool.seats == pool.threads)
        pthread_cond_broadcast(&pool.work_wanted);
    else
        for (int i = 0; i < pool.seats; i++)
            pthread_cond_signal(&pool.work_wanted);
    pthread_mutex_unlock(&pool.lock);
    work(job);
    pthread_mutex_lock(&pool.lock);
    pool.seats = 0; /* too late to join */
    pthread_mutex_unlock(&pool.lock);
    for (int i = 0; i < SPINS && atomic_load(&pool.active);)
        i++;
    pthread_mutex_lock(&pool.lock);
    while (pool.active)
        pthread_cond_wait(&pool.work_done, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
    pthread_mutex_unlock(&pool.call);
}
