/* cblas_sgemm for MLX: products of few rows or columns by one library, all others by another.
 *
 * mlxlm/blas.py compiles this, and says by `mlxlm_route` which functions they are. MLX finds `cblas_sgemm` here
 * because this library is loaded before it. The function in numpy counts in 64 bits.
 */
#include <stdint.h>

typedef void (*Gemm)(int, int, int, int, int, int, float, const float*, int, const float*, int, float, float*, int);
typedef void (*Gemm64)(int, int, int, int64_t, int64_t, int64_t, float, const float*, int64_t, const float*, int64_t,
                       float, float*, int64_t);

static Gemm narrow;
static Gemm64 wide;
static int least;

void mlxlm_route(Gemm few, Gemm64 many) {
  narrow = few;
  wide = many;
}

/* Products whose result has fewer than `smallest` rows or columns go to `few`. Not while one is being computed. */
void mlxlm_least(int smallest) { least = smallest; }

void cblas_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float* a, int lda,
                 const float* b, int ldb, float beta, float* c, int ldc) {
  if (m < least || n < least)
    narrow(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
  else
    wide(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
