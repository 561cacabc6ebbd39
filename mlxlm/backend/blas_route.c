/* cblas_sgemm for MLX, which calls nothing else: products with one row or column by the library's cblas_sgemv, products
 * with few rows or columns by one library, all others by another.
 *
 * mlxlm/backend/blas.py compiles this and sets the functions, of one library or of both. MLX finds this cblas_sgemm
 * because this library is loaded before MLX. numpy's OpenBLAS has 64-bit integers.
 */
#include <stdint.h>

typedef void (*Gemm)(int, int, int, int, int, int, float, const float*, int, const float*, int, float, float*, int);
typedef void (*Gemv)(int, int, int, int, float, const float*, int, const float*, int, float, float*, int);
typedef void (*Gemm64)(int, int, int, int64_t, int64_t, int64_t, float, const float*, int64_t, const float*, int64_t,
                       float, float*, int64_t);
typedef void (*Gemv64)(int, int, int64_t, int64_t, float, const float*, int64_t, const float*, int64_t, float, float*,
                       int64_t);

enum { ROW_MAJOR = 101, NO_TRANS = 111, TRANS = 112 };

static Gemm small_gemm;
static Gemv gemv;
static Gemm64 large_gemm;
static Gemv64 gemv64;
static int min_size;

void mlxlm_set_library(Gemm new_gemm, Gemv new_gemv) {
  small_gemm = new_gemm;
  gemv = new_gemv;
}

void mlxlm_set_library64(Gemm64 new_gemm, Gemv64 new_gemv) {
  large_gemm = new_gemm;
  gemv64 = new_gemv;
}

/* Products with fewer than `size` rows or columns go to the first library. Must not be called during a product. */
void mlxlm_set_min_size(int size) { min_size = size; }

/* y = alpha * op(a) * x + beta * y, for a stored in `rows` rows. */
static void multiply(int trans, int rows, int columns, float alpha, const float* a, int lda, const float* x, int incx,
                     float beta, float* y, int incy) {
  if (gemv)
    gemv(ROW_MAJOR, trans, rows, columns, alpha, a, lda, x, incx, beta, y, incy);
  else
    gemv64(ROW_MAJOR, trans, rows, columns, alpha, a, lda, x, incx, beta, y, incy);
}

void cblas_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float* a, int lda,
                 const float* b, int ldb, float beta, float* c, int ldc) {
  if (order == ROW_MAJOR && k > 0 && m == 1) { /* op(b) transposed times a row */
    int incx = trans_a == NO_TRANS ? 1 : lda;
    if (trans_b == NO_TRANS)
      multiply(TRANS, k, n, alpha, b, ldb, a, incx, beta, c, 1);
    else
      multiply(NO_TRANS, n, k, alpha, b, ldb, a, incx, beta, c, 1);
  } else if (order == ROW_MAJOR && k > 0 && n == 1) { /* op(a) times a column */
    int incx = trans_b == NO_TRANS ? ldb : 1;
    if (trans_a == NO_TRANS)
      multiply(NO_TRANS, m, k, alpha, a, lda, b, incx, beta, c, ldc);
    else
      multiply(TRANS, k, m, alpha, a, lda, b, incx, beta, c, ldc);
  } else if (m < min_size || n < min_size) {
    small_gemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
  } else {
    large_gemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
  }
}
