/* cblas_sgemm for MLX, which calls nothing else: products with one row or column by the library's cblas_sgemv, on two
 * threads; products with few rows or columns by one library, all others by another. If that is OpenBLAS alone, products
 * with few rows are made of those with one.
 *
 * mlxlm/backend/blas.py compiles this and sets the functions, of one library or of both. MLX finds this cblas_sgemm
 * because this library is loaded before MLX. numpy's OpenBLAS has 64-bit integers.
 */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

typedef void (*Gemm)(int, int, int, int, int, int, float, const float*, int, const float*, int, float, float*, int);
typedef void (*Gemv)(int, int, int, int, float, const float*, int, const float*, int, float, float*, int);
typedef void (*Gemm64)(int, int, int, int64_t, int64_t, int64_t, float, const float*, int64_t, const float*, int64_t,
                       float, float*, int64_t);
typedef void (*Gemv64)(int, int, int64_t, int64_t, float, const float*, int64_t, const float*, int64_t, float, float*,
                       int64_t);

enum { FEW_ROWS = 7 }; /* for which OpenBLAS's sgemv, on a block of a matrix after another, is faster than its sgemm */
enum { ROW_MAJOR = 101, NO_TRANS = 111, TRANS = 112 };

static Gemm small_gemm;
static Gemv gemv;
static Gemm64 large_gemm;
static Gemv64 gemv64;
static int min_size;
static void (*set_openblas_threads)(int); /* if OpenBLAS computes all products */
static int num_openblas_threads;

void mlxlm_set_library(Gemm new_gemm, Gemv new_gemv) {
  small_gemm = new_gemm;
  gemv = new_gemv;
}

void mlxlm_set_library64(Gemm64 new_gemm, Gemv64 new_gemv) {
  large_gemm = new_gemm;
  gemv64 = new_gemv;
}

/* OpenBLAS computes all products, with `number` threads those of matrices. By a vector each call has one thread: with
 * its own, decoding was a third as fast. */
void mlxlm_set_openblas_threads(void (*set)(int), int number) {
  set_openblas_threads = set;
  num_openblas_threads = number;
}

/* Products with fewer than `size` rows or columns go to the first library. Must not be called during a product. */
void mlxlm_set_min_size(int size) { min_size = size; }

/* y = alpha * op(a) * x + beta * y, for a stored in `rows` rows, and for `vectors` x and y, `x_step` and `y_step` apart. */
typedef struct {
  int trans, rows, columns, lda, incx, incy, vectors, x_step, y_step;
  float alpha, beta;
  const float *a, *x;
  float* y;
} Product;

enum { CACHED_SIZE = 1 << 15 }; /* of a matrix: a half of a core's second-level cache or less */

static void compute(const Product* p) {
  int step = p->vectors == 1 ? p->rows : CACHED_SIZE / p->columns + 1;
  for (int row = 0; row < p->rows; row += step) {
    int rows = p->rows - row < step ? p->rows - row : step;
    const float* a = p->a + (int64_t)row * p->lda;
    for (int i = 0; i < p->vectors; i++) {
      const float* x = p->x + (int64_t)i * p->x_step;
      float* y = p->y + (int64_t)i * p->y_step + (int64_t)row * p->incy;
      if (gemv)
        gemv(ROW_MAJOR, p->trans, rows, p->columns, p->alpha, a, p->lda, x, p->incx, p->beta, y, p->incy);
      else
        gemv64(ROW_MAJOR, p->trans, rows, p->columns, p->alpha, a, p->lda, x, p->incx, p->beta, y, p->incy);
    }
  }
}

/* Threads that share a loop with its caller: one core doesn't use all of the memory's bandwidth. For a while after each
 * loop they poll for the next, since waking a thread takes as long as a product of a small model. */
enum { POLL_NANOSECONDS = 200000, MAX_THREADS = 16, MIN_SHARED_SIZE = 1 << 18 };

static int num_threads = 1, num_started;
static pthread_mutex_t in_use = PTHREAD_MUTEX_INITIALIZER, sleeping = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t posted = PTHREAD_COND_INITIALIZER;
static void (*loop_body)(void*, int);
static void* loop_context;
static atomic_ullong loop; /* its number, its chunks, and the next chunk, in 32, 16 and 16 bits */
static atomic_int num_done;

/* Loops run on this many threads. Must not be called during a product. */
void mlxlm_set_num_threads(int number) { num_threads = number < MAX_THREADS ? number : MAX_THREADS; }

static int64_t nanoseconds(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * INT64_C(1000000000) + time.tv_nsec;
}

static void run_chunks(void) {
  for (;;) {
    unsigned long long state = atomic_load(&loop);
    do {
      if ((state & 0xffff) == (state >> 16 & 0xffff)) return;
    } while (!atomic_compare_exchange_weak(&loop, &state, state + 1));
    loop_body(loop_context, (int)(state & 0xffff)); /* the caller waits for this chunk: the body is still this loop's */
    atomic_fetch_add(&num_done, 1);
  }
}

static void* share_loops(void* unused) {
  for (;;) {
    unsigned long long number = atomic_load(&loop) >> 32;
    run_chunks();
    int64_t end = nanoseconds() + POLL_NANOSECONDS;
    while (atomic_load(&loop) >> 32 == number && nanoseconds() < end) sched_yield();
    pthread_mutex_lock(&sleeping);
    while (atomic_load(&loop) >> 32 == number) pthread_cond_wait(&posted, &sleeping);
    pthread_mutex_unlock(&sleeping);
  }
  return unused;
}

/* The threads do not exist in a forked process. */
static void reset_threads(void) {
  pthread_mutex_init(&in_use, 0);
  pthread_mutex_init(&sleeping, 0);
  pthread_cond_init(&posted, 0);
  num_started = 0;
}

__attribute__((constructor)) static void prepare_fork(void) { pthread_atfork(0, 0, reset_threads); }

/* Call body(context, i) for each chunk i, of at most 65,535, on all threads. Chunks of a second caller run on its own. */
void mlxlm_parallel_for(int chunks, void (*body)(void*, int), void* context) {
  if (num_threads < 2 || chunks < 2 || pthread_mutex_trylock(&in_use)) {
    for (int i = 0; i < chunks; i++) body(context, i);
    return;
  }
  pthread_t thread;
  while (num_started < num_threads - 1 && !pthread_create(&thread, 0, share_loops, 0) && !pthread_detach(thread))
    num_started++;
  loop_body = body;
  loop_context = context;
  atomic_store(&num_done, 0);
  pthread_mutex_lock(&sleeping);
  atomic_store(&loop, ((atomic_load(&loop) >> 32) + 1) << 32 | (unsigned long long)chunks << 16);
  pthread_cond_broadcast(&posted);
  pthread_mutex_unlock(&sleeping);
  run_chunks();
  while (atomic_load(&num_done) != chunks) sched_yield();
  pthread_mutex_unlock(&in_use);
}

static void compute_part(void* parts, int i) { compute((const Product*)parts + i); }

static void multiply(int trans, int rows, int columns, float alpha, const float* a, int lda, const float* x, int incx,
                     float beta, float* y, int incy, int vectors, int x_step, int y_step) {
  if (set_openblas_threads) set_openblas_threads(1);
  Product all = {trans, rows, columns, lda, incx, incy, vectors, x_step, y_step, alpha, beta, a, x, y};
  if (trans != NO_TRANS || (int64_t)rows * columns < MIN_SHARED_SIZE) {
    compute(&all);
    return;
  }
  /* The halves are the same on one thread: a sum can depend on where its row is in a product. */
  Product halves[] = {all, all};
  halves[0].rows = rows / 2;
  halves[1].rows = rows - rows / 2;
  halves[1].a += (int64_t)halves[0].rows * lda;
  halves[1].y += (int64_t)halves[0].rows * incy;
  mlxlm_parallel_for(2, compute_part, halves);
}

void cblas_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float* a, int lda,
                 const float* b, int ldb, float beta, float* c, int ldc) {
  if (order == ROW_MAJOR && k > 0 && m == 1) { /* op(b) transposed times a row */
    int incx = trans_a == NO_TRANS ? 1 : lda;
    if (trans_b == NO_TRANS)
      multiply(TRANS, k, n, alpha, b, ldb, a, incx, beta, c, 1, 1, 0, 0);
    else
      multiply(NO_TRANS, n, k, alpha, b, ldb, a, incx, beta, c, 1, 1, 0, 0);
  } else if (order == ROW_MAJOR && k > 0 && n == 1) { /* op(a) times a column */
    int incx = trans_b == NO_TRANS ? ldb : 1;
    if (trans_a == NO_TRANS)
      multiply(NO_TRANS, m, k, alpha, a, lda, b, incx, beta, c, ldc, 1, 0, 0);
    else
      multiply(TRANS, k, m, alpha, a, lda, b, incx, beta, c, ldc, 1, 0, 0);
  } else if (set_openblas_threads && order == ROW_MAJOR && k > 0 && m <= FEW_ROWS && trans_a == NO_TRANS &&
             trans_b == TRANS) {
    multiply(NO_TRANS, n, k, alpha, b, ldb, a, 1, beta, c, 1, m, lda, ldc);
  } else {
    if (set_openblas_threads) set_openblas_threads(num_threads > 1 ? num_openblas_threads : 1);
    if (m < min_size || n < min_size)
      small_gemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
    else
      large_gemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
  }
}
