/* A pool of threads that take parts of one piece of work at a time.
 *
 * A thread without work spins for a moment and then sleeps: the next GEMM of a step comes within
 * microseconds, the next step may never come. The caller does not wait for a thread that has not begun: the
 * others do its share. If one that has begun takes long, the caller sleeps, too: most likely another process has its
 * core, and the system can give it the caller's.
 */
#include "threads.h"

#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

enum { MAX_WORKERS = 63, PARTS_EACH = 4, SPIN_NANOSECONDS = 500000, WAIT_NANOSECONDS = 30000 };

static struct {
    Work work;
    const void *arg;
    int64_t count, part;
} task; /* changes only while `is_open` is 0 and nobody is `num_inside` */
static atomic_int is_open, num_inside, num_sleeping, is_waiting;
static atomic_uint generation;
static _Atomic int64_t next;
static atomic_int max_number; /* workers that may take part in this piece of work */

static pthread_mutex_t pool_mutex = PTHREAD_MUTEX_INITIALIZER; /* held by the caller of parallel_for */
static pthread_mutex_t sleep_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake_up = PTHREAD_COND_INITIALIZER, all_left = PTHREAD_COND_INITIALIZER;
static int num_workers;

static inline void pause_a_moment(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * (int64_t)1000000000 + now.tv_nsec;
}

static void run_parts(void) {
    for (;;) {
        int64_t first = atomic_fetch_add(&next, task.part);
        if (first >= task.count) return;
        int64_t last = first + task.part;
        task.work(task.arg, first, last < task.count ? last : task.count);
    }
}

/* Waits for a piece of work after the one that was `seen`; returns its number. */
static unsigned wait_for_work(unsigned seen) {
    int64_t until = nanoseconds() + SPIN_NANOSECONDS;
    for (int spin = 1; atomic_load(&generation) == seen; spin++) {
        pause_a_moment();
        if (spin % 64 || nanoseconds() < until) continue;
        pthread_mutex_lock(&sleep_mutex);
        atomic_fetch_add(&num_sleeping, 1);
        while (atomic_load(&generation) == seen) pthread_cond_wait(&wake_up, &sleep_mutex);
        atomic_fetch_sub(&num_sleeping, 1);
        pthread_mutex_unlock(&sleep_mutex);
    }
    return atomic_load(&generation);
}

static void *worker(void *number) {
    unsigned seen = 0;
    for (;;) {
        seen = wait_for_work(seen);
        atomic_fetch_add(&num_inside, 1);
        if (atomic_load(&is_open) && (int)(intptr_t)number < atomic_load(&max_number)) run_parts();
        if (atomic_fetch_sub(&num_inside, 1) == 1 && atomic_load(&is_waiting)) {
            pthread_mutex_lock(&sleep_mutex);
            pthread_cond_signal(&all_left);
            pthread_mutex_unlock(&sleep_mutex);
        }
    }
    return 0;
}

static void wait_for_workers(void) {
    int64_t until = nanoseconds() + WAIT_NANOSECONDS;
    for (int spin = 1; atomic_load(&num_inside); spin++) {
        pause_a_moment();
        if (spin % 64 || nanoseconds() < until) continue;
        pthread_mutex_lock(&sleep_mutex);
        atomic_store(&is_waiting, 1);
        while (atomic_load(&num_inside)) pthread_cond_wait(&all_left, &sleep_mutex);
        atomic_store(&is_waiting, 0);
        pthread_mutex_unlock(&sleep_mutex);
    }
}

/* After a fork, the child process has this thread alone. */
static void reset_after_fork(void) {
    num_workers = 0;
    atomic_store(&is_open, 0);
    atomic_store(&num_inside, 0);
    atomic_store(&num_sleeping, 0);
    atomic_store(&is_waiting, 0);
    pthread_mutex_init(&pool_mutex, 0);
    pthread_mutex_init(&sleep_mutex, 0);
    pthread_cond_init(&wake_up, 0);
    pthread_cond_init(&all_left, 0);
}

static void start_workers(int wanted) {
    static int registered;
    if (!registered) registered = !pthread_atfork(0, 0, reset_after_fork);
    for (; num_workers < wanted && num_workers < MAX_WORKERS; num_workers++) {
        pthread_t thread;
        if (pthread_create(&thread, 0, worker, (void *)(intptr_t)num_workers)) return;
        pthread_detach(thread);
    }
}

void parallel_for(Work work, const void *arg, int64_t count, int64_t grain, int num_threads) {
    if (num_threads < 2 || count < 2 * grain || pthread_mutex_trylock(&pool_mutex)) {
        work(arg, 0, count);
        return;
    }
    start_workers(num_threads - 1);
    int64_t grains = (count + grain - 1) / grain, parts = (int64_t)num_threads * PARTS_EACH;
    task.work = work;
    task.arg = arg;
    task.count = count;
    task.part = (grains + parts - 1) / parts * grain;
    atomic_store(&max_number, num_threads - 1);
    atomic_store(&next, 0);
    atomic_store(&is_open, 1);
    atomic_fetch_add(&generation, 1);
    if (atomic_load(&num_sleeping)) {
        pthread_mutex_lock(&sleep_mutex);
        pthread_cond_broadcast(&wake_up);
        pthread_mutex_unlock(&sleep_mutex);
    }
    run_parts();
    atomic_store(&is_open, 0);
    wait_for_workers();
    pthread_mutex_unlock(&pool_mutex);
}
