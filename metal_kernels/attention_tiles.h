// Tiles of 8 x 8 elements in a SIMD group, for the training attention kernels. Include after common.h.
//
// A lane holds two neighboring elements of one row of a tile. This is the layout of a simdgroup_matrix on Apple's GPUs,
// for factors and sums, so a product can be masked, exponentiated and multiplied again in registers.
//
// All three kernels have the same two products. A SIMD group holds rows in registers, and the rows that they are
// multiplied with are staged in threadgroup memory:
//   scores[staged, held] = staged * held^T    over D
//   sums[held, D] += factors[held, staged] * staged    where factors are computed from the transposed scores
// A staged tile is the left factor of the first product and the right factor of the second, so both load it by rows: a
// lane loads a run of four elements of a row, for two tiles. Column 2 j + e of the two tiles is then element 4 j + e
// and 4 j + e + 2 of 16. The order of D doesn't matter for a sum over D, if the held rows have the same order.

// Returns the column (x) and row (y) of a lane's first element.
METAL_FUNC ushort2 tile_place(uint lane) {
  const uint quad = lane / 4;
  return ushort2((quad & 2) * 2 + (lane % 2) * 2, (quad & 4) + (lane / 2) % 4);
}

// Computes sum += left * right in float32.
template <typename T>
METAL_FUNC void tile_multiply_add(thread float2& sum, vec<T, 2> left, vec<T, 2> right) {
  simdgroup_matrix<T, 8, 8> a, b;
  simdgroup_float8x8 c;
  a.thread_elements()[0] = left.x;
  a.thread_elements()[1] = left.y;
  b.thread_elements()[0] = right.x;
  b.thread_elements()[1] = right.y;
  c.thread_elements()[0] = sum.x;
  c.thread_elements()[1] = sum.y;
  simdgroup_multiply_accumulate(c, a, b, c);
  sum = float2(c.thread_elements()[0], c.thread_elements()[1]);
}

// Returns the lane that holds row 2 j and column r, for a lane at row r and column 2 j. Row 2 j + 1 is 2 lanes further.
METAL_FUNC ushort tile_opposite(uint lane) {
  return ushort((lane & 8) << 1 | (lane & 16) >> 1 | (lane & 1) << 2 | (lane & 4) >> 2);
}

// Rounds a tile to T and transposes it.
template <typename T>
METAL_FUNC vec<T, 2> tile_transpose(float2 pair, uint lane) {
  const ushort from = tile_opposite(lane);
  const bool odd = lane & 2;
  vec<T, 2> above, below;
  if constexpr (sizeof(T) == 2) {
    vec<T, 2> rounded;
    rounded.x = T(pair.x);
    rounded.y = T(pair.y);
    const uint bits = as_type<uint>(rounded);
    above = as_type<vec<T, 2>>(simd_shuffle(bits, from));
    below = as_type<vec<T, 2>>(simd_shuffle(bits, ushort(from + 2)));
  } else {
    above = simd_shuffle(pair, from);
    below = simd_shuffle(pair, ushort(from + 2));
  }
  vec<T, 2> result;
  result.x = odd ? above.y : above.x;
  result.y = odd ? below.y : below.x;
  return result;
}

// Returns the value of column r, for a lane at row r. `pair` has the same values in all rows.
METAL_FUNC float tile_of_row(float2 pair, uint lane) {
  const float2 values = simd_shuffle(pair, tile_opposite(lane));
  return lane & 2 ? values.y : values.x;
}

// Reduce the eight elements of each column, which are in the lanes that differ in bits 1, 2 and 4.
METAL_FUNC float2 tile_column_max(float2 pair) {
  pair = max(pair, simd_shuffle_xor(pair, ushort(2)));
  pair = max(pair, simd_shuffle_xor(pair, ushort(4)));
  return max(pair, simd_shuffle_xor(pair, ushort(16)));
}

METAL_FUNC float2 tile_column_sum(float2 pair) {
  pair += simd_shuffle_xor(pair, ushort(2));
  pair += simd_shuffle_xor(pair, ushort(4));
  return pair + simd_shuffle_xor(pair, ushort(16));
}

// Returns probabilities * slopes, and 0 where a probability is 0: what a row doesn't see may not be a number.
METAL_FUNC float2 tile_product(float2 probabilities, float2 slopes) {
  return float2(
      probabilities.x == 0.0f ? 0.0f : probabilities.x * slopes.x,
      probabilities.y == 0.0f ? 0.0f : probabilities.y * slopes.y);
}

// HELD: blocks of 8 rows that a SIMD group holds. STAGED: rows in threadgroup memory at a time. PARTS: SIMD groups that
// share the work on the rows that they hold; see the kernels.
template <typename T, int D, int HELD, int STAGED, int PARTS>
struct Tiles {
  typedef vec<T, 2> pair;
  typedef vec<T, 4> run;
  static constant constexpr int THREADS = 4 * PARTS * SIMD;  // of a threadgroup
  static constant constexpr int ROWS = 32 * HELD;  // held by a threadgroup
  static constant constexpr int RUNS = (D + 16 * PARTS - 1) / (16 * PARTS) * 4 * PARTS;  // of a row, padded
  static constant constexpr int TILES = RUNS / 2;
  static constant constexpr int LD = RUNS + (sizeof(T) == 2 ? 2 : 1);  // padding: rows begin in different memory banks
  static constant constexpr int STAGE = STAGED * LD;  // runs of a staged tile

  // All threads of a threadgroup copy COUNT rows to a tile, zeros from row `count` on. A thread copies runs of one row.
  // The stride is 1 in most arrays; then a compiler joins the loads of a run. Arrays begin at any element of a buffer,
  // so a run may not be aligned as a vector.
  template <int COUNT>
  static METAL_FUNC void stage(
      threadgroup run* tile,
      const device T* rows,
      int64_t row_stride,
      int64_t stride,
      int count,
      uint thread_index) {
    constexpr int BESIDE = THREADS / COUNT;  // threads of a row
    const int row = thread_index / BESIDE, column = thread_index % BESIDE;
    const device T* from = rows + row * row_stride + 4 * column * stride;
    if (stride == 1) {
      UNROLL
      for (int i = 0; i < (RUNS + BESIDE - 1) / BESIDE; ++i) {
        const bool inside = row < count && 4 * (column + i * BESIDE) < D;
        if (RUNS % BESIDE == 0 || column + i * BESIDE < RUNS) {
          tile[row * LD + column + i * BESIDE] = load_run(from, 1, inside);
        }
        from += 4 * BESIDE;
      }
    } else {
      ROLLED
      for (int i = column; i < RUNS; i += BESIDE) {
        tile[row * LD + i] = load_run(from, stride, row < count && 4 * i < D);
        from += 4 * BESIDE * stride;
      }
    }
  }

  static METAL_FUNC run load_run(const device T* from, int64_t stride, bool inside) {
    run loaded = run(T(0));
    if (inside) {
      loaded.x = from[0];
      from += stride;
      loaded.y = from[0];
      from += stride;
      loaded.z = from[0];
      from += stride;
      loaded.w = from[0];
    }
    return loaded;
  }

  // Loads the lane's part of the transposed rows that a SIMD group holds, from the first of them in a tile.
  static METAL_FUNC void hold(thread pair* held, const threadgroup run* tile, ushort2 place) {
    const threadgroup T* at = (const threadgroup T*)(tile + place.x * LD) + 4 * (place.y / 2) + place.y % 2;
    UNROLL
    for (int h = 0; h < HELD; ++h) {
      UNROLL
      for (int i = 0; i < TILES; ++i) {
        const int offset = 32 * h * LD + 16 * (i / 2) + 2 * (i % 2);
        held[h * TILES + i].x = at[offset];
        held[h * TILES + i].y = at[offset + 4 * LD];
      }
    }
  }

  // Returns the offset of a lane's first run in a tile.
  static METAL_FUNC int lane_offset(ushort2 place) {
    return place.y * LD + place.x / 2;
  }

  // Computes scores += staged * held^T. `staged` is the lane's first run.
  template <int BLOCKS>
  static METAL_FUNC void add_scores(thread float2* scores, const threadgroup run* staged, const thread pair* held) {
    UNROLL
    for (int i = 0; i < TILES / 2; ++i) {
      simdgroup_barrier(mem_flags::mem_none);  // stops the compiler from hoisting all loads
      UNROLL
      for (int b = 0; b < BLOCKS; ++b) {
        const run left = staged[8 * b * LD + 4 * i];
        UNROLL
        for (int h = 0; h < HELD; ++h) {
          tile_multiply_add<T>(scores[b * HELD + h], left.xy, held[h * TILES + 2 * i]);
          tile_multiply_add<T>(scores[b * HELD + h], left.zw, held[h * TILES + 2 * i + 1]);
        }
      }
    }
  }

  // Computes sums += factors * staged, for COUNT tiles along D.
  template <int BLOCKS, int COUNT>
  static METAL_FUNC void add_products(thread float2* sums, const thread pair* factors, const threadgroup run* staged) {
    UNROLL
    for (int i = 0; i < COUNT / 2; ++i) {
      simdgroup_barrier(mem_flags::mem_none);
      UNROLL
      for (int b = 0; b < BLOCKS; ++b) {
        const run right = staged[8 * b * LD + 4 * i];
        UNROLL
        for (int h = 0; h < HELD; ++h) {
          tile_multiply_add<T>(sums[h * COUNT + 2 * i], factors[b * HELD + h], right.xy);
          tile_multiply_add<T>(sums[h * COUNT + 2 * i + 1], factors[b * HELD + h], right.zw);
        }
      }
    }
  }

  // Stores the lane's part of the sums, times `scale`, in rows of D elements: COUNT tiles from `column` on.
  template <int COUNT, typename U>
  static METAL_FUNC void store(
      device U* rows, const thread float2* sums, float scale, int count, int column, ushort2 place) {
    UNROLL
    for (int h = 0; h < HELD; ++h) {
      const int row = 8 * h + place.y;
      UNROLL
      for (int i = 0; i < COUNT / 2; ++i) {
        const int d = column + 16 * i + 2 * place.x;
        if (row < count && d < D) {
          const float2 first = sums[h * COUNT + 2 * i] * scale, second = sums[h * COUNT + 2 * i + 1] * scale;
          vec<U, 4> values;
          values.x = U(first.x);
          values.y = U(first.y);
          values.z = U(second.x);
          values.w = U(second.y);
          *(device vec<U, 4>*)(rows + row * D + d) = values;
        }
      }
    }
  }

  // Returns which staged rows the SIMD group's rows see: the lowest and the highest first one, and the lowest and the
  // highest end, 0 if the SIMD group has no row. `ranges` are pairs in order; `last` is the last row that exists.
  template <typename P>
  static METAL_FUNC int4 bounds(P ranges, int64_t row_stride, int64_t stride, int row, int last) {
    const int64_t top = min(row, last) * row_stride, bottom = min(row + 8 * HELD - 1, last) * row_stride;
    return int4(ranges[top], ranges[bottom], ranges[top + stride], row <= last ? ranges[bottom + stride] : 0);
  }

  // Sets scores to -INFINITY where a held row doesn't see the staged row. `start` is the first staged row of the lane.
  // Few tiles need it, so it loads the ranges again.
  template <int BLOCKS, typename P>
  static METAL_FUNC void mask(
      thread float2* scores, int start, P ranges, int64_t row_stride, int64_t stride, int row, int last) {
    UNROLL
    for (int h = 0; h < HELD; ++h) {
      const int64_t x = min(row + 8 * h, last) * row_stride, y = min(row + 8 * h + 1, last) * row_stride;
      const int2 low = int2(ranges[x], ranges[y]), high = int2(ranges[x + stride], ranges[y + stride]);
      UNROLL
      for (int b = 0; b < BLOCKS; ++b) {
        const int at = start + 8 * b, n = b * HELD + h;
        scores[n].x = at >= low.x && at < high.x ? scores[n].x : -INFINITY;
        scores[n].y = at >= low.y && at < high.y ? scores[n].y : -INFINITY;
      }
    }
  }
};
