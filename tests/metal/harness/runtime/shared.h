// Constants used by kernels (C++ for OpenCL) and by the runtime (C++).
#pragma once

namespace hx {
enum Reduction { sum, minimum, maximum };
enum Shuffle { to_lane, exclusive_or, down, up, broadcast };
enum Fence { no_fence = 0, device_fence = 1, threadgroup_fence = 2 };
enum Attribute {
  dispatch_quadgroups_per_threadgroup,
  dispatch_simdgroups_per_threadgroup,
  dispatch_threads_per_threadgroup,
  grid_origin,
  grid_size,
  quadgroup_index_in_threadgroup,
  quadgroups_per_threadgroup,
  simdgroup_index_in_threadgroup,
  simdgroups_per_threadgroup,
  thread_execution_width,
  thread_index_in_quadgroup,
  thread_index_in_simdgroup,
  thread_index_in_threadgroup,
  thread_position_in_grid,
  thread_position_in_threadgroup,
  threadgroup_position_in_grid,
  threadgroups_per_grid,
  threads_per_grid,
  threads_per_simdgroup,
  threads_per_threadgroup,
};
}  // namespace hx
