// Weighted quantile of rows: the smallest absolute value up to which the weights reach a share of their sum.
//
// inputs    values [R, N] float32, weights [R, N] uint32 whose sum is below 2^32, not read with COUNT, amount float32
//           scalar
// outputs   quantile [R, 1] float32
// template  COUNT  all weights are 1, and amount is the sum to reach; otherwise it is the share of the sum of all
// grid      R threadgroups of 1,024 threads, in x
//
// A radix select (Alabi et al. 2012): absolute values have the order of their bits. The first pass adds the
// weights of all values with the same highest 11 bits, and finds those 11 bits of the result. Two more passes find 10
// bits each, among the values that begin like the result. Integer sums don't depend on the order of the threads.

constexpr uint BINS = 2048, DIGIT = 10;  // bins of the first pass; bits of the others
const uint N = values_shape[1], tid = thread_index_in_threadgroup, threads = threads_per_threadgroup.x;
const size_t start = size_t(threadgroup_position_in_grid.x) * N;

threadgroup atomic_uint sums[BINS];
threadgroup uint scratch[SIMD], found[2];  // sums of SIMD groups; the bin of the result, and the sum of those before it

if (tid == 0) {
  found[0] = found[1] = 0;  // stays so for a row of NaN, whose weights are 0
}
uint prefix = 0, target = COUNT ? uint(amount) : 0;
for (int shift = 2 * DIGIT; shift >= 0; shift -= DIGIT) {
  for (uint i = tid; i < BINS; i += threads) {
    atomic_store_explicit(&sums[i], 0u, memory_order_relaxed);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = tid; i < N; i += threads) {
    // The bins from 2^DIGIT on are of values that begin with the next prefix. They don't matter.
    const uint bin = ((as_type<uint>(float(values[start + i])) & 0x7fffffffu) >> shift) - (prefix << DIGIT);
    if (bin < BINS) {
      const uint weight = COUNT ? 1u : weights[start + i];
      if (weight > 0) {
        atomic_fetch_add_explicit(&sums[bin], weight, memory_order_relaxed);
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  // Each thread has two bins.
  const uint first = atomic_load_explicit(&sums[2 * tid], memory_order_relaxed);
  const uint both = first + atomic_load_explicit(&sums[2 * tid + 1], memory_order_relaxed);
  uint below = simd_prefix_exclusive_sum(both);
  if (thread_index_in_simdgroup == SIMD - 1) {
    scratch[simdgroup_index_in_threadgroup] = below + both;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint group = scratch[thread_index_in_simdgroup];
  below += simd_sum(thread_index_in_simdgroup < simdgroup_index_in_threadgroup ? group : 0u);
  const uint total = simd_sum(group);
  if (!COUNT && shift == 2 * DIGIT) {
    target = clamp(uint(float(total) * amount), 1u, max(total, 1u));
  }
  if (below < target && target <= below + both) {
    const bool second = below + first < target;
    found[0] = 2 * tid + (second ? 1 : 0);
    found[1] = below + (second ? first : 0);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  prefix = (prefix << DIGIT) + found[0];
  target -= found[1];
}
if (tid == 0) {
  quantile[threadgroup_position_in_grid.x] = as_type<float>(prefix);
}
