/* A pool of threads that take parts of one piece of work at a time.
 *
 * A thread without work looks for some for a moment and then sleeps: the next product of a step comes within
 * microseconds, the next step may never come. Nobody waits for a thread that has not begun: what it would have taken
 * is done by the others. For one that has begun and takes long the others sleep, too: most likely somebody else has its
 * core, and the system can give it theirs.
 */
#include "threads.h"

#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

enum { MAX_WORKERS = 63, PARTS_EACH = 4, LOOK_NANOSECONDS = 500000, WAIT_NANOSECONDS = 30000 };

static struct {
    Work work;
    const void *given;
    int64_t count, part;
} task; /* changes only while `open` is 0 and nobody is `inside` */
static atomic_int open, inside, sleeping, waiting;
static atomic_uint calls;
static _Atomic int64_t next;
static atomic_int limit; /* workers that may take part in this piece of work */

static pthread_mutex_t taken = PTHREAD_MUTEX_INITIALIZER; /* by whoever shares work */
static pthread_mutex_t bed = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t bell = PTHREAD_COND_INITIALIZER, done = PTHREAD_COND_INITIALIZER;
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

static void take_parts(void) {
    for (;;) {
        int64_t first = atomic_fetch_add(&next, task.part);
        if (first >= task.count) return;
        int64_t last = first + task.part;
        task.work(task.given, first, last < task.count ? last : task.count);
    }
}

/* Until another call than the one that was `seen`. */
static unsigned wait_for_call(unsigned seen) {
    int64_t until = nanoseconds() + LOOK_NANOSECONDS;
    for (int turn = 1; atomic_load(&calls) == seen; turn++) {
        pause_a_moment();
        if (turn % 64 || nanoseconds() < until) continue;
        pthread_mutex_lock(&bed);
        atomic_fetch_add(&sleeping, 1);
        while (atomic_load(&calls) == seen) pthread_cond_wait(&bell, &bed);
        atomic_fetch_sub(&sleeping, 1);
        pthread_mutex_unlock(&bed);
    }
    return atomic_load(&calls);
}

static void *worker(void *number) {
    unsigned seen = 0;
    for (;;) {
        seen = wait_for_call(seen);
        atomic_fetch_add(&inside, 1);
        if (atomic_load(&open) && (int)(intptr_t)number < atomic_load(&limit)) take_parts();
        if (atomic_fetch_sub(&inside, 1) == 1 && atomic_load(&waiting)) {
            pthread_mutex_lock(&bed);
            pthread_cond_signal(&done);
            pthread_mutex_unlock(&bed);
        }
    }
    return 0;
}

static void wait_for_workers(void) {
    int64_t until = nanoseconds() + WAIT_NANOSECONDS;
    for (int turn = 1; atomic_load(&inside); turn++) {
        pause_a_moment();
        if (turn % 64 || nanoseconds() < until) continue;
        pthread_mutex_lock(&bed);
        atomic_store(&waiting, 1);
        while (atomic_load(&inside)) pthread_cond_wait(&done, &bed);
        atomic_store(&waiting, 0);
        pthread_mutex_unlock(&bed);
    }
}

/* A child process has this thread alone. */
static void begin_again(void) {
    num_workers = 0;
    atomic_store(&open, 0);
    atomic_store(&inside, 0);
    atomic_store(&sleeping, 0);
    atomic_store(&waiting, 0);
    pthread_mutex_init(&taken, 0);
    pthread_mutex_init(&bed, 0);
    pthread_cond_init(&bell, 0);
    pthread_cond_init(&done, 0);
}

static void hire(int wanted) {
    static int registered;
    if (!registered) registered = !pthread_atfork(0, 0, begin_again);
    for (; num_workers < wanted && num_workers < MAX_WORKERS; num_workers++) {
        pthread_t thread;
        if (pthread_create(&thread, 0, worker, (void *)(intptr_t)num_workers)) return;
        pthread_detach(thread);
    }
}

void share(Work work, const void *given, int64_t count, int64_t grain, int threads) {
    if (threads < 2 || count < 2 * grain || pthread_mutex_trylock(&taken)) {
        work(given, 0, count);
        return;
    }
    hire(threads - 1);
    int64_t grains = (count + grain - 1) / grain, parts = (int64_t)threads * PARTS_EACH;
    task.work = work;
    task.given = given;
    task.count = count;
    task.part = (grains + parts - 1) / parts * grain;
    atomic_store(&limit, threads - 1);
    atomic_store(&next, 0);
    atomic_store(&open, 1);
    atomic_fetch_add(&calls, 1);
    if (atomic_load(&sleeping)) {
        pthread_mutex_lock(&bed);
        pthread_cond_broadcast(&bell);
        pthread_mutex_unlock(&bed);
    }
    take_parts();
    atomic_store(&open, 0);
    wait_for_workers();
    pthread_mutex_unlock(&taken);
}
