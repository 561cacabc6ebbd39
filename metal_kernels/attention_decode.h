// Functions of the decode attention kernels. Include after common.h. Members are inlined, so that arrays stay in
// registers, and declare the address space of `this`, which is no longer `thread` by default in MSL 4.1.

// The layout of the D elements of a key, value or output row in the lanes of a SIMD group: COUNT neighboring lanes with
// EACH neighboring elements; SIMD / COUNT rows side by side.
template <int D>
struct DecodeLanes {
  static constant constexpr int COUNT = D <= 32 ? 8 : D <= 64 ? 16 : 32;
  static constant constexpr int EACH = D <= 128 ? 4 : 8;
};

// Returns, for lane i of each aligned block of N lanes (N a power of two), the sum of values[i] over the block. This
// takes N - 1 shuffles; separate sums would take N log2 N.
template <int N>
METAL_FUNC float sum_to_lanes(thread float* values, ushort lane) {
  UNROLL
  for (int width = N / 2; width > 0; width /= 2) {
    const bool upper = (lane & width) != 0;
    UNROLL
    for (int i = 0; i < N / 2; ++i) {  // a fixed number of iterations, or the loop might not be unrolled
      if (i < width) {
        // Otherwise clang makes `upper ? values[i] : ...` a choice of addresses, and the array leaves registers.
        const float low = values[i], high = values[i + width];
        values[i] = (upper ? high : low) + simd_shuffle_xor(upper ? low : high, ushort(width));
      }
    }
  }
  return values[0];
}

// Rows of D numbers in any address space. With UNIT, which lets the compiler join loads, `step` must be 1.
template <typename P, int D, bool UNIT>
struct DecodeDense {
  P rows;
  int64_t stride, step;

  METAL_FUNC DecodeDense from(int row) const thread {
    const DecodeDense rest = {rows + row * stride, stride, step};
    return rest;
  }

  // Loads the lane's elements of a row, zeros if it is not `inside`. All lanes of the SIMD group must call it.
  METAL_FUNC void load(thread float* x, int row, bool inside, ushort lane) const thread {
    constexpr int EACH = DecodeLanes<D>::EACH;
    const int first = lane % DecodeLanes<D>::COUNT * EACH;
    if (inside && first < D) {
      const int64_t at = row * stride + first * (UNIT ? 1 : step);
      UNROLL
      for (int e = 0; e < EACH; ++e) {
        x[e] = float(rows[at + e * (UNIT ? 1 : step)]);
      }
    } else {
      UNROLL
      for (int e = 0; e < EACH; ++e) {
        x[e] = 0;
      }
    }
  }
};

// Rows of D affinely quantized numbers scale * code + bias: BITS-bit codes, the first in a word's lowest bits; scale
// and bias per GROUP elements. One lane loads each of these and shuffles it to the others that need it.
template <typename T, int D, int GROUP, int BITS, bool UNIT>
struct DecodePacked {
  const device uint32_t* words;
  const device T* scales;
  const device T* biases;
  int64_t word_stride, word_step, scale_stride, scale_step, bias_stride, bias_step;

  METAL_FUNC DecodePacked from(int row) const thread {
    DecodePacked rest = *this;
    rest.words += row * word_stride;
    rest.scales += row * scale_stride;
    rest.biases += row * bias_stride;
    return rest;
  }

  METAL_FUNC void load(thread float* x, int row, bool inside, ushort lane) const thread {
    constexpr int EACH = DecodeLanes<D>::EACH, COUNT = DecodeLanes<D>::COUNT, PARTS = D / GROUP;
    const int place = lane % COUNT, first = place * EACH;
    uint codes[EACH / 4];  // four codes each
    float setting = 0;
    if (inside && place < PARTS) {
      setting = float(scales[row * scale_stride + place * scale_step]);
    } else if (inside && place < 2 * PARTS) {
      setting = float(biases[row * bias_stride + (place - PARTS) * bias_step]);
    }
    const bool used = inside && first < D;
    UNROLL
    for (int i = 0; i < EACH / 4; ++i) {
      codes[i] = 0;
      if (used) {
        const int word = (first + 4 * i) / (32 / BITS);
        const int64_t at = row * word_stride + word * (UNIT ? 1 : word_step);
        if (BITS == 8) {
          codes[i] = words[at];
        } else {  // two lanes may share a word; each loads its half
          codes[i] = ((const device ushort*)words)[2 * at + (first / 4 + i) % 2];
        }
      }
    }
    const int part = first / GROUP;
    const float scale = simd_shuffle(setting, ushort(lane - place + part % PARTS));
    const float bias = simd_shuffle(setting, ushort(lane - place + PARTS + part % PARTS));
    UNROLL
    for (int e = 0; e < EACH; ++e) {
      const uint code = codes[e / 4] >> (BITS * (e % 4)) & ((1 << BITS) - 1);
      x[e] = used ? scale * float(code) + bias : 0.0f;
    }
  }
};

// Softmax-weighted sums of values for the query rows that share a key head: row = (head in the group) * QUERIES +
// (query). A threadgroup has ROW_GROUPS * KEY_GROUPS SIMD groups; each has MINE rows in registers and processes every
// KEY_GROUPS-th run of STEP keys, with its own online softmax (Milakov & Gimelshein 2018), merged at the end.
template <
    typename T,
    int D,
    int GROUPED,
    int QUERIES,
    int ROW_GROUPS,
    int KEY_GROUPS,
    bool WINDOW,
    bool SOFTCAP,
    bool SLOPES>
struct DecodeRows {
  static constant constexpr int LANES = DecodeLanes<D>::COUNT;
  static constant constexpr int EACH = DecodeLanes<D>::EACH;
  static constant constexpr int BESIDE = SIMD / LANES;  // keys that a SIMD group processes side by side
  static constant constexpr int ROWS = GROUPED * QUERIES;
  static constant constexpr int MINE = (ROWS + ROW_GROUPS - 1) / ROW_GROUPS;
  static constant constexpr int SLOTS = MINE <= 1 ? 1 : MINE <= 2 ? 2 : MINE <= 4 ? 4 : 8;  // MINE, as a power of two
  static constant constexpr int AHEAD = LANES / SLOTS;  // keys that a lane processes one after the other
  static constant constexpr int STEP = SIMD / SLOTS;  // keys per step, BESIDE * AHEAD: one score per lane
  static constant constexpr int SIMDGROUPS = ROW_GROUPS * KEY_GROUPS;
  static constant constexpr int SCRATCH = KEY_GROUPS > 1 ? SIMDGROUPS * (D + 2 * SLOTS) : 1;  // floats
  static constant constexpr float LOWEST = -3.4e38f;  // instead of -inf, which would give inf - inf

  ushort lane;
  int row_group, key_group;
  int first_key, end_key;  // the keys of the threadgroup
  int last, window;  // the last key that the lane's row sees, and the number of keys that it sees
  float cap, slope;  // both times log2(e): scores are base-2 exponents
  float top, total;  // maximum score of the lane's row; the lane's part of the sum of exp2(score - top)
  float query[MINE * EACH], sum[MINE * EACH];

  // Returns the lane's row, of which it holds one score per step; ROWS or more if it has none.
  METAL_FUNC int row() const thread {
    const int slot = lane % SLOTS;
    return slot < MINE ? row_group * MINE + slot : ROWS;
  }

  // Initializes the state for part `split` of `splits` of the keys from `first` to S.
  METAL_FUNC void
  begin(uint simdgroup, uint lane_, int first, int S, int window_, float cap_, int split, int splits) thread {
    lane = ushort(lane_);
    row_group = simdgroup / KEY_GROUPS;
    key_group = simdgroup % KEY_GROUPS;
    last = S - QUERIES + row() % QUERIES;
    window = window_;
    cap = M_LOG2E_F * cap_;
    slope = 0;
    const int unseen = WINDOW ? max(first, S - QUERIES + 1 - window) : first;  // keys before the windows of all queries
    const int steps = (S - unseen + splits * STEP - 1) / (splits * STEP);
    first_key = unseen + split * steps * STEP;
    end_key = min(first_key + steps * STEP, S);
    top = LOWEST;
    total = 0;
    UNROLL
    for (int i = 0; i < MINE * EACH; ++i) {
      sum[i] = 0;
    }
  }

  // Returns whether this is the first lane of its row in the SIMD group.
  METAL_FUNC bool speaks() const thread {
    return lane < SLOTS && row() < ROWS;
  }

  // Copies the slope of each row from its first lane to the others.
  METAL_FUNC void share_slopes(float given) thread {
    slope = M_LOG2E_F * simd_shuffle(given, ushort(lane % SLOTS));
  }

  // Loads every query element once per threadgroup. `scratch` holds SCRATCH floats.
  METAL_FUNC void load_queries(
      const device T* from,
      int64_t head_stride,
      int64_t query_stride,
      int64_t step,
      float scale,
      threadgroup float* scratch) thread {
    const DecodeDense<const threadgroup float*, D, true> rows = {scratch + row_group * KEY_GROUPS * D, D, 1};
    UNROLL
    for (int r = 0; r < MINE; r += KEY_GROUPS) {
      const int mine = row_group * MINE + r + key_group;
      const bool used = r + key_group < MINE && mine < ROWS && lane < LANES;
      const DecodeDense<const device T*, D, false> source = {
          from + mine / QUERIES * head_stride + mine % QUERIES * query_stride, 0, step};
      float x[EACH];
      source.load(x, 0, used, lane);
      if (KEY_GROUPS > 1) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        put(scratch + (row_group * KEY_GROUPS + key_group) * D, x, lane < LANES);
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
      UNROLL
      for (int i = 0; i < KEY_GROUPS; ++i) {
        if (r + i < MINE) {
          if (KEY_GROUPS > 1) {
            rows.load(x, i, true, lane);
          }
          UNROLL
          for (int e = 0; e < EACH; ++e) {
            query[(r + i) * EACH + e] = scale * (KEY_GROUPS > 1 ? x[e] : simd_shuffle(x[e], ushort(lane % LANES)));
          }
        }
      }
    }
  }

  // Stores the lane's elements of a row in threadgroup memory.
  template <typename U>
  METAL_FUNC void put(threadgroup U* to, const thread float* x, bool used) const thread {
    const int first = lane % LANES * EACH;
    if (used && first < D) {
      UNROLL
      for (int e = 0; e < EACH; ++e) {
        to[first + e] = U(x[e]);
      }
    }
  }

  // Processes the keys [key, key + STEP). Those from `end` on are zeros; they are S or more, so no query sees them.
  // `origin` is the key of the first row of both arrays. With FULL, all rows exist.
  template <bool FULL, typename Keys, typename Values>
  METAL_FUNC void take(const Keys keys, const Values values, int key, int origin, int end) thread {
    const int mine = key + lane / LANES;
    const Keys near_keys = keys.from(mine - origin);  // so that the offsets below are the same for all lanes
    const Values near_values = values.from(mine - origin);
    float x[EACH];
    float scores[LANES];
    UNROLL
    for (int u = 0; u < AHEAD; ++u) {
      near_keys.load(x, u * BESIDE, FULL || mine + u * BESIDE < end, lane);
      UNROLL
      for (int r = 0; r < SLOTS; ++r) {
        float product = 0;
        if (r < MINE) {
          UNROLL
          for (int e = 0; e < EACH; ++e) {
            product += query[r * EACH + e] * x[e];
          }
        }
        scores[u * SLOTS + r] = product;
      }
    }
    float score = sum_to_lanes<LANES>(scores, lane);
    const int at = mine + lane % LANES / SLOTS * BESIDE;  // the key of this score
    if (SOFTCAP) {
      score = cap * tanh(score);
    }
    if (SLOPES) {
      score += slope * float(at - last);
    }
    if (at > last || (WINDOW && at <= last - window)) {
      score = -INFINITY;
    }
    float higher = max(top, score);
    UNROLL
    for (int lanes = SLOTS; lanes < SIMD; lanes *= 2) {
      higher = max(higher, simd_shuffle_xor(higher, ushort(lanes)));
    }
    const float fade = exp2(top - higher);
    const float weight = exp2(score - higher);
    top = higher;
    total = total * fade + weight;
    UNROLL
    for (int r = 0; r < MINE; ++r) {
      const float fade_of_row = simd_shuffle(fade, ushort(r));
      UNROLL
      for (int e = 0; e < EACH; ++e) {
        sum[r * EACH + e] *= fade_of_row;
      }
    }
    UNROLL
    for (int u = 0; u < AHEAD; ++u) {
      near_values.load(x, u * BESIDE, FULL || mine + u * BESIDE < end, lane);
      UNROLL
      for (int r = 0; r < MINE; ++r) {
        const float weight_of_row = simd_shuffle(weight, ushort(lane / LANES * LANES + u * SLOTS + r));
        UNROLL
        for (int e = 0; e < EACH; ++e) {
          sum[r * EACH + e] += weight_of_row * x[e];
        }
      }
    }
  }

  // Processes all keys of the threadgroup. One row group reads them from device memory; several share tiles of TILE
  // keys and values in threadgroup memory, so that each row is loaded once.
  template <int TILE, typename Keys, typename Values>
  METAL_FUNC void attend(const Keys keys, const Values values, threadgroup T* tile) thread {
    const int end = end_key;
    if (ROW_GROUPS == 1) {
      for (int key = first_key + key_group * STEP; key < end; key += KEY_GROUPS * STEP) {
        if (key + STEP <= end) {
          take<true>(keys, values, key, 0, end);
        } else {
          take<false>(keys, values, key, 0, end);
        }
      }
      return;
    }
    threadgroup T* const tile_values = tile + TILE * D;
    const DecodeDense<const threadgroup T*, D, true> tiled_keys = {tile, D, 1}, tiled_values = {tile_values, D, 1};
    const int simdgroup = row_group * KEY_GROUPS + key_group;
    for (int origin = first_key; origin < end; origin += TILE) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (int i = simdgroup * BESIDE; i < TILE; i += SIMDGROUPS * BESIDE) {
        const int row = i + lane / LANES;
        const bool inside = origin + row < end;
        float x[EACH];
        keys.load(x, origin + row, inside, lane);
        put(tile + row * D, x, true);
        values.load(x, origin + row, inside, lane);
        put(tile_values + row * D, x, true);
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (int key = origin + key_group * STEP; key < min(origin + TILE, end); key += KEY_GROUPS * STEP) {
        take<true>(tiled_keys, tiled_values, key, origin, end);
      }
    }
  }

  // Writes one element of a row: with SPLIT the unnormalized sum, otherwise the output.
  template <bool SPLIT, typename Out>
  METAL_FUNC void write(device Out* to, int d, float value, float peak, float all) const thread {
    to[d] = Out(SPLIT ? value : all == 0 ? 0.0f : value / all);
    if (SPLIT && d == 0) {
      to[D] = Out(peak);
      to[D + 1] = Out(all);
    }
  }

  // Merges the SIMD groups. Row i goes to out + i * stride: D elements, with SPLIT unnormalized and followed by the
  // maximum score and the sum of exp2(score - greatest). `scratch` holds SCRATCH floats.
  template <bool SPLIT, typename Out>
  METAL_FUNC void finish(device Out* out, int64_t stride, threadgroup float* scratch) thread {
    UNROLL
    for (int lanes = SLOTS; lanes < SIMD; lanes *= 2) {
      total += simd_shuffle_xor(total, ushort(lanes));
    }
    UNROLL
    for (int i = 0; i < MINE * EACH; ++i) {
      UNROLL
      for (int lanes = LANES; lanes < SIMD; lanes *= 2) {
        sum[i] += simd_shuffle_xor(sum[i], ushort(lanes));
      }
    }
    threadgroup float* const tops = scratch + SIMDGROUPS * D + row_group * KEY_GROUPS * SLOTS;
    threadgroup float* const totals = tops + SIMDGROUPS * SLOTS;
    if (KEY_GROUPS > 1) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (lane < SLOTS) {
        tops[key_group * SLOTS + lane] = top;
        totals[key_group * SLOTS + lane] = total;
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    threadgroup float* const parts = scratch + row_group * KEY_GROUPS * D;
    UNROLL
    for (int r = 0; r < MINE; ++r) {
      const int row = row_group * MINE + r;
      device Out* const to = out + row * stride;
      float peak = simd_shuffle(top, ushort(r)), all = simd_shuffle(total, ushort(r));
      if (KEY_GROUPS == 1) {
        const int first = lane * EACH;
        if (row < ROWS && first < D) {
          UNROLL
          for (int e = 0; e < EACH; ++e) {
            write<SPLIT>(to, first + e, sum[r * EACH + e], peak, all);
          }
        }
      } else {
        const float own = peak;
        for (int i = 0; i < KEY_GROUPS; ++i) {
          peak = max(peak, tops[i * SLOTS + r]);
        }
        all = 0;
        for (int i = 0; i < KEY_GROUPS; ++i) {
          all += totals[i * SLOTS + r] * exp2(tops[i * SLOTS + r] - peak);
        }
        const float fade = exp2(own - peak);
        float x[EACH];
        UNROLL
        for (int e = 0; e < EACH; ++e) {
          x[e] = fade * sum[r * EACH + e];
        }
        put(parts + key_group * D, x, lane < LANES);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (int d = key_group * SIMD + lane; d < D; d += KEY_GROUPS * SIMD) {
          float value = 0;
          for (int i = 0; i < KEY_GROUPS; ++i) {
            value += parts[i * D + d];
          }
          if (row < ROWS) {
            write<SPLIT>(to, d, value, peak, all);
          }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
    }
  }
};
