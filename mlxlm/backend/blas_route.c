/* cblas_sgemm for MLX: products with few rows or columns by one library, all others by another.
 *
 * mlxlm/backend/blas.py compiles this and sets the two functions with `mlxlm_set_libraries`. MLX finds this cblas_sgemm
 * because this library is loaded before MLX. numpy's OpenBLAS has 64-bit integers.
 */
#include <stdint.h>

typedef void (*Gemm)(int, int, int, int, int, int, float, const float*, int, const float*, int, float, float*, int);
typedef void (*Gemm64)(int, int, int, int64_t, int64_t, int64_t, float, const float*, int64_t, const float*, int64_t,
                       float, float*, int64_t);

static Gemm small_gemm;
static Gemm64 large_gemm;
static int min_size;

void mlxlm_set_libraries(Gemm small, Gemm64 large) {
  small_gemm = small;
  large_gemm = large;
}

/* Products with fewer than `size` rows or columns go to the first library. Must not be called during a product. */
void mlxlm_set_min_size(int size) { min_size = size; }

void cblas_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float* a, int lda,
                 const float* b, int ldb, float beta, float* c, int ldc) {
  if (m < min_size || n < min_size)
    small_gemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
  else
    large_gemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
