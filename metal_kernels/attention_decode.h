// Functions of the decode attention kernels. Include after common.h. Members are inlined, so that arrays stay in
// registers, and declare the address space of `this`, which is no longer `thread` by default in MSL 4.1.

// The layout of the D elements of a key, value or output row in the lanes of a SIMD group: COUNT neighboring lanes with
// EACH neighboring elements; BESIDE rows side by side.
template <int D>
struct DecodeLanes {
  static constant constexpr int COUNT = D <= 32 ? 8 : D <= 64 ? 16 : 32;
  static constant constexpr int EACH = D <= 128 ? 4 : 8;
  static constant constexpr int BESIDE = SIMD / COUNT;

  // Returns the lane's row.
  static METAL_FUNC int row(ushort lane) {
    return COUNT == SIMD ? 0 : lane / COUNT;
  }

  // Returns the lane's first element.
  static METAL_FUNC int place(ushort lane) {
    return (COUNT == SIMD ? lane : lane % COUNT) * EACH;
  }

  // Returns whether the lane has elements.
  static METAL_FUNC bool used(ushort lane) {
    return COUNT * EACH == D || place(lane) < D;
  }
};

// Sums over lanes. Values 0 to N - 1 are given one after the other (N a power of two); `add` of the last returns, for
// lane i of each aligned block of N lanes, the sum of value i over the block. Two values become one as soon as possible,
// so that few wait in registers. This takes N - 1 shuffles; separate sums would take N log2 N.
template <int N>
struct LaneSums {
  float waiting[5];

  METAL_FUNC float add(float value, int i, ushort lane) thread {
    UNROLL
    for (int k = 0; k < 5; ++k) {
      const int width = 1 << k;
      if (width < N && (i & (width - 1)) == width - 1) {
        const float low = waiting[k];
        if (i & width) {
          const bool upper = (lane & width) != 0;
          value = (upper ? value : low) + simd_shuffle_xor(upper ? low : value, ushort(width));
        } else {
          waiting[k] = value;
        }
      }
    }
    return value;
  }
};

// Adds up values that are equal in aligned blocks of FROM lanes over aligned blocks of TO lanes.
template <int FROM, int TO>
METAL_FUNC float sum_blocks(float value) {
  UNROLL
  for (int width = FROM; width < TO; width *= 2) {
    value += simd_shuffle_xor(value, ushort(width));
  }
  return value;
}

// Rows of D numbers: in device memory, or, TILED, one after the other in threadgroup memory. Offsets have 32 bits, which
// take fewer registers; only `advance` needs 64.
template <typename P, typename T, int D, bool TILED>
struct DecodeDense {
  using Raw = T;
  using Lanes = DecodeLanes<D>;
  static constant constexpr bool PACKED = false;
  static constant constexpr int PART = Lanes::COUNT;
  static constant constexpr int RAW = Lanes::EACH;  // of type Raw, per row and lane
  static constant constexpr int MOST_ROWS = 16 / RAW, MOST_SCORES = 16;  // at a time

  P from;  // the lane's elements of row 0
  int stride, step;

  METAL_FUNC void begin(P rows, int stride_, int step_, ushort lane) thread {
    from = rows + Lanes::place(lane) * int64_t(step_);
    stride = stride_;
    step = step_;
  }

  // Makes row `rows` row 0.
  METAL_FUNC void advance(int rows) thread {
    from += rows * int64_t(stride);
  }

  // Returns whether `load` can load W rows, every BESIDE-th from `first` on, of `count` rows.
  template <int W>
  METAL_FUNC bool fits(int first, int count) const thread {
    return TILED || (step == 1 && first + W * Lanes::BESIDE <= count);
  }

  // Loads the lane's elements of W rows that fit, every BESIDE-th from `first` + Lanes::row on. W = 1 always fits: rows
  // from `count` on are copies of the last one before it.
  template <int W>
  METAL_FUNC void load(thread T* x, int first, int count, ushort lane) const thread {
    const int row = first + Lanes::row(lane), next = W == 1 && !TILED ? step : 1;
    int offset = (W == 1 && !TILED ? min(row, count - 1) : row) * stride;
    UNROLL
    for (int u = 0; u < W; ++u) {
      UNROLL
      for (int e = 0; e < RAW; e += 4) {  // four at a time: LLVM would make single ones a memcpy
        const P four = from + offset + e * next;
        thread T* const to = x + u * RAW + e;
        to[0] = Lanes::used(lane) ? four[0] : T(0.0f);
        to[1] = Lanes::used(lane) ? four[next] : T(0.0f);
        to[2] = Lanes::used(lane) ? four[2 * next] : T(0.0f);
        to[3] = Lanes::used(lane) ? four[3 * next] : T(0.0f);
      }
      offset += Lanes::BESIDE * stride;
    }
  }

  METAL_FUNC float element(const thread T* x, int e) const thread {
    return float(x[e]);
  }

  // Quantization, which these rows don't have.
  template <int SLOTS>
  METAL_FUNC float2 settings(int, int, ushort) const thread {
    return float2(1.0f, 0.0f);
  }
};

// Rows of D affinely quantized numbers scale * code + bias: BITS-bit codes, the first in a word's lowest bits; scale
// and bias per GROUP elements, a part of the row, which PART lanes have.
template <typename T, int D, int GROUP, int BITS>
struct DecodePacked {
  using Raw = conditional_t<BITS == 8, uint32_t, ushort>;  // four codes
  using Lanes = DecodeLanes<D>;
  static constant constexpr bool PACKED = true;
  static constant constexpr int PART = GROUP / Lanes::EACH;
  static constant constexpr int RAW = Lanes::EACH / 4;
  static constant constexpr int MOST_ROWS = 8, MOST_SCORES = 8;  // at a time
  static constant constexpr int PER_WORD = 8 / BITS;

  const device Raw* from;  // the lane's codes of row 0
  const device T* scales;  // of the lane's part of row 0, like the biases
  const device T* biases;
  int stride, step, scale_stride, bias_stride;

  METAL_FUNC void begin(
      const device uint32_t* words,
      int word_stride,
      int word_step,
      const device T* scales_,
      int scale_stride_,
      int scale_step,
      const device T* biases_,
      int bias_stride_,
      int bias_step,
      ushort lane) thread {
    const int own = Lanes::place(lane) / 4, part = lane % Lanes::COUNT / PART;
    from = (const device Raw*)(words + own / PER_WORD * int64_t(word_step)) + own % PER_WORD;
    stride = PER_WORD * word_stride;
    step = word_step;
    scales = scales_ + part * int64_t(scale_step);
    scale_stride = scale_stride_;
    biases = biases_ + part * int64_t(bias_step);
    bias_stride = bias_stride_;
  }

  // As for dense rows, like `fits` and `load`.
  METAL_FUNC void advance(int rows) thread {
    from += rows * int64_t(stride);
    scales += rows * int64_t(scale_stride);
    biases += rows * int64_t(bias_stride);
  }

  template <int W>
  METAL_FUNC bool fits(int first, int count) const thread {
    return step == 1 && first + W * Lanes::BESIDE <= count;
  }

  template <int W>
  METAL_FUNC void load(thread Raw* x, int first, int count, ushort lane) const thread {
    const int row = first + Lanes::row(lane);
    int offset = (W == 1 ? min(row, count - 1) : row) * stride;
    UNROLL
    for (int u = 0; u < W; ++u) {
      x[u * RAW] = Lanes::used(lane) ? from[offset] : Raw(0);
      if (RAW > 1) {
        x[u * RAW + 1] = Lanes::used(lane) ? from[offset + (W == 1 && PER_WORD == 1 ? step : 1)] : Raw(0);
      }
      offset += Lanes::BESIDE * stride;
    }
  }

  // The code of element e.
  METAL_FUNC float element(const thread Raw* x, int e) const thread {
    return float(uint(x[e / 4]) >> (BITS * (e % 4)) & ((1 << BITS) - 1));
  }

  // Returns scale and bias of the lane's part in one row: lane i of a part gets row i / SLOTS of those that `load`
  // loads. Every number is loaded by one lane. All lanes of the SIMD group must call it.
  template <int SLOTS>
  METAL_FUNC float2 settings(int first, int count, ushort lane) const thread {
    float2 setting = float2(0.0f);
    if (lane % SLOTS == 0 && Lanes::used(lane)) {
      const int row = min(first + Lanes::row(lane) + lane % PART / SLOTS * Lanes::BESIDE, count - 1);
      setting = float2(float(scales[row * scale_stride]), float(biases[row * bias_stride]));
    }
    if (SLOTS > 1) {
      const ushort from = lane - lane % SLOTS;
      setting = float2(simd_shuffle(setting.x, from), simd_shuffle(setting.y, from));
    }
    return setting;
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
  static constant constexpr int STEP = SIMD / SLOTS;  // keys per step, one score per lane: LANES / SLOTS for each lane
  static constant constexpr int SIMDGROUPS = ROW_GROUPS * KEY_GROUPS;
  // Rows that the SIMD groups merge at a time. Metal's min and max are not constexpr.
  static constant constexpr int ROUND = KEY_GROUPS * SIMD < D ? 1 : KEY_GROUPS * SIMD / D;
  static constant constexpr int SCRATCH = KEY_GROUPS > 1 ? SIMDGROUPS * (ROUND * D + 2 * SLOTS) : 1;  // floats
  static constant constexpr float LOWEST = -3.4e38f;  // instead of -inf, which would give inf - inf

  ushort lane;
  int row_group, key_group;
  int first_key, end_key;  // the keys of the threadgroup
  int last, window;  // the last key that the lane's row sees, and the number of keys that it sees
  float cap, slope;  // both times log2(e): scores are base-2 exponents
  float top, total;  // maximum score of the lane's row; the lane's part of the sum of exp2(score - top)
  float query[MINE * EACH], sum[MINE * EACH];
  float part_query, part_sum;  // for quantized keys and values: sums that their biases multiply, of the lane's part

  // Returns the lane's row, of which it holds one score per step; ROWS or more if it has none.
  METAL_FUNC int row() const thread {
    const int slot = lane % SLOTS;
    return slot < MINE ? row_group * MINE + slot : ROWS;
  }

  // Initializes the state for part `split` of `splits` of the keys from `first` to S.
  METAL_FUNC void
  begin(uint simdgroup, uint lane_, int first, int S, int window_, float cap_, int split, int splits) thread {
    lane = ushort(lane_);
    row_group = ROW_GROUPS == 1 ? 0 : simdgroup / KEY_GROUPS;
    key_group = ROW_GROUPS == 1 ? simdgroup : simdgroup % KEY_GROUPS;
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
    part_sum = 0;
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

  // Begins the softmax of each row with its sink, a score without a value, which the row's first lane gives. One of the
  // SIMD groups that share the row's keys has it.
  METAL_FUNC void begin_with_sinks(float given, int split) thread {
    if (key_group == 0 && split == 0) {
      top = max(LOWEST, M_LOG2E_F * simd_shuffle(given, ushort(lane % SLOTS)));
      total = speaks() ? 1.0f : 0.0f;
    }
  }

  // Loads every query element once per threadgroup. `scratch` holds SCRATCH floats.
  METAL_FUNC void load_queries(
      const device T* from,
      int64_t head_stride,
      int64_t query_stride,
      int64_t step,
      float scale,
      threadgroup float* scratch) thread {
    const int first = lane % LANES * EACH;
    UNROLL
    for (int r = 0; r < MINE; r += KEY_GROUPS) {
      const int mine = row_group * MINE + r + key_group;
      const device T* const source = from + mine / QUERIES * head_stride + mine % QUERIES * query_stride + first * step;
      float x[EACH];
      UNROLL
      for (int e = 0; e < EACH; ++e) {
        x[e] = r + key_group < MINE && mine < ROWS && first < D && lane < LANES ? scale * float(source[e * step]) : 0.0f;
      }
      threadgroup float* const row = scratch + row_group * KEY_GROUPS * D + first;
      if (KEY_GROUPS > 1) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        put(row - first + key_group * D, x, lane < LANES);
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
      UNROLL
      for (int i = 0; i < min(KEY_GROUPS, MINE - r); ++i) {
        UNROLL
        for (int e = 0; e < EACH; ++e) {
          query[(r + i) * EACH + e] = KEY_GROUPS == 1 ? simd_shuffle(x[e], ushort(lane % LANES))
              : first < D                             ? row[i * D + e]
                                                      : 0.0f;
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

  // Returns the product of one query row and one of W rows of keys, summed over the lanes of a part: lane i of a part
  // gets query row i % SLOTS and key i / SLOTS % W.
  template <int W, typename Rows>
  METAL_FUNC float products(const Rows keys, int first, int count) const thread {
    typename Rows::Raw x[W * Rows::RAW];
    keys.template load<W>(x, first, count, lane);
    LaneSums<W * SLOTS> sums;
    float product = 0;
    UNROLL
    for (int i = 0; i < W * SLOTS; ++i) {
      product = 0;
      if (i % SLOTS < MINE) {
        UNROLL
        for (int e = 0; e < EACH; ++e) {
          product += query[i % SLOTS * EACH + e] * keys.element(x + i / SLOTS * Rows::RAW, e);
        }
      }
      product = sums.add(product, i, lane);
    }
    return sum_blocks<W * SLOTS, Rows::PART>(product);
  }

  // Adds W rows of values, whose weights are in the lanes from `from` on.
  template <int W, typename Rows>
  METAL_FUNC void accumulate(const Rows values, int first, int count, float weight, ushort from) thread {
    typename Rows::Raw x[W * Rows::RAW];
    values.template load<W>(x, first, count, lane);
    UNROLL
    for (int i = 0; i < W * SLOTS; ++i) {
      if (i % SLOTS < MINE) {
        const float weight_of_row = simd_shuffle(weight, ushort(from + i));
        UNROLL
        for (int e = 0; e < EACH; ++e) {
          sum[i % SLOTS * EACH + e] += weight_of_row * values.element(x + i / SLOTS * Rows::RAW, e);
        }
      }
    }
  }

  // Processes the keys [key, key + STEP); those from `end` on are S or more, so no query sees them. Row 0 of both arrays
  // is `key`.
  template <typename Rows>
  METAL_FUNC void take(const Rows keys, const Rows values, int key, int end) thread {
    constexpr int PART = Rows::PART;
    constexpr int MOST = (PART < Rows::MOST_SCORES ? PART : Rows::MOST_SCORES) / SLOTS;
    constexpr int W = MOST < Rows::MOST_ROWS ? MOST : Rows::MOST_ROWS;
    constexpr int BLOCK = PART / SLOTS * BESIDE;  // keys whose scores fit in the lanes of a part
    const int stop = min(key + STEP, end);
    const int at = key + DecodeLanes<D>::row(lane) + lane % LANES / SLOTS * BESIDE;  // the key of the lane's score
    float score = 0;
    ROLLED
    for (int block = key; block < stop; block += BLOCK) {
      const int block_end = min(block + BLOCK, stop);
      float product = 0;
      ROLLED
      for (int first = block; first < block_end;) {
        const bool later = lane % PART / SLOTS * BESIDE >= first - block;
        float scores;
        if (W > 1 && keys.template fits<W>(first - key, end - key)) {
          scores = products<W>(keys, first - key, end - key);
          first += W * BESIDE;
        } else {
          scores = products<1>(keys, first - key, end - key);
          first += BESIDE;
        }
        product = later ? scores : product;
      }
      if (Rows::PACKED) {
        const float2 setting = keys.template settings<SLOTS>(block - key, end - key, lane);
        product = setting.x * product + setting.y * part_query;
      }
      product = sum_blocks<PART, LANES>(product);
      score = at >= block ? product : score;
    }
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
    part_sum *= fade;
    ROLLED
    for (int block = key; block < stop; block += BLOCK) {
      const int block_end = min(block + BLOCK, stop);
      float scaled = weight;
      if (Rows::PACKED) {
        const float2 setting = values.template settings<SLOTS>(block - key, end - key, lane);
        const ushort from = (LANES == SIMD ? 0 : lane - lane % LANES) + (block - key) / BESIDE * SLOTS;
        const float own = simd_shuffle(weight, ushort(from + lane % PART));
        scaled = setting.x * own;
        part_sum += setting.y * own;
      }
      ROLLED
      for (int first = block; first < block_end;) {
        const ushort from = (PART == SIMD ? 0 : lane - lane % PART) + (first - block) / BESIDE * SLOTS;
        if (W > 1 && values.template fits<W>(first - key, end - key)) {
          accumulate<W>(values, first - key, end - key, scaled, from);
          first += W * BESIDE;
        } else {
          accumulate<1>(values, first - key, end - key, scaled, from);
          first += BESIDE;
        }
      }
    }
  }

  // Processes all keys of the threadgroup. One row group reads them from device memory; several share tiles of TILE
  // keys and values in threadgroup memory, so that each row is loaded once.
  template <int TILE, typename Rows>
  METAL_FUNC void attend(Rows keys, Rows values, threadgroup T* tile) thread {
    const int end = end_key;
    if (ROW_GROUPS == 1) {
      if (Rows::PACKED) {
        LaneSums<SLOTS> sums;
        UNROLL
        for (int r = 0; r < SLOTS; ++r) {
          float elements = 0;
          if (r < MINE) {
            UNROLL
            for (int e = 0; e < EACH; ++e) {
              elements += query[r * EACH + e];
            }
          }
          part_query = sums.add(elements, r, lane);
        }
        part_query = sum_blocks<SLOTS, Rows::PART>(part_query);
      }
      keys.advance(first_key + key_group * STEP);
      values.advance(first_key + key_group * STEP);
      for (int key = first_key + key_group * STEP; key < end; key += KEY_GROUPS * STEP) {
        take(keys, values, key, end);
        keys.advance(KEY_GROUPS * STEP);
        values.advance(KEY_GROUPS * STEP);
      }
      if (Rows::PACKED) {
        part_sum = sum_blocks<SLOTS, Rows::PART>(part_sum);
        UNROLL
        for (int r = 0; r < MINE; ++r) {
          const float bias = simd_shuffle(part_sum, ushort(lane - lane % Rows::PART + r));
          UNROLL
          for (int e = 0; e < EACH; ++e) {
            sum[r * EACH + e] += bias;
          }
        }
      }
      return;
    }
    using Tile = DecodeDense<const threadgroup T*, T, D, true>;
    threadgroup T* const tile_values = tile + TILE * D;
    const int simdgroup = row_group * KEY_GROUPS + key_group;
    keys.advance(first_key);
    values.advance(first_key);
    for (int origin = first_key; origin < end; origin += TILE) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (int i = simdgroup * BESIDE; i < TILE; i += SIMDGROUPS * BESIDE) {
        stage(keys, tile, i, end - origin);
        stage(values, tile_values, i, end - origin);
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (int key = key_group * STEP; key < min(TILE, end - origin); key += KEY_GROUPS * STEP) {
        Tile tiled_keys, tiled_values;
        tiled_keys.begin(tile + key * D, D, 1, lane);
        tiled_values.begin(tile_values + key * D, D, 1, lane);
        take(tiled_keys, tiled_values, origin + key, origin + TILE);
      }
      keys.advance(TILE);
      values.advance(TILE);
    }
  }

  // Copies the rows i to i + BESIDE of a tile, the keys from `origin` + i on, to threadgroup memory.
  template <typename Rows>
  METAL_FUNC void stage(const Rows rows, threadgroup T* tile, int i, int count) const thread {
    typename Rows::Raw raw[Rows::RAW];
    rows.template load<1>(raw, i, count, lane);
    const float2 setting = rows.template settings<Rows::PART>(i, count, lane);
    float x[EACH];
    UNROLL
    for (int e = 0; e < EACH; ++e) {
      x[e] = setting.x * rows.element(raw, e) + setting.y;
    }
    put(tile + (i + lane / LANES) * D, x, true);
  }

  // Merges the SIMD groups. Row i goes to out + i * stride: D elements, with SPLIT unnormalized and followed by the
  // maximum score and the sum of exp2(score - greatest). `scratch` holds SCRATCH floats.
  template <bool SPLIT, typename Out>
  METAL_FUNC void finish(device Out* out, int64_t stride, threadgroup float* scratch) thread {
    total = sum_blocks<SLOTS, SIMD>(total);
    float peak = top, all = total;
    if (KEY_GROUPS > 1) {
      threadgroup float* const tops = scratch + SIMDGROUPS * ROUND * D + row_group * KEY_GROUPS * SLOTS + lane % SLOTS;
      threadgroup float* const totals = tops + SIMDGROUPS * SLOTS;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (lane < SLOTS) {
        tops[key_group * SLOTS] = top;
        totals[key_group * SLOTS] = total;
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (int i = 0; i < KEY_GROUPS; ++i) {
        peak = max(peak, tops[i * SLOTS]);
      }
      all = 0;
      for (int i = 0; i < KEY_GROUPS; ++i) {
        all += totals[i * SLOTS] * exp2(tops[i * SLOTS] - peak);
      }
    }
    if (SPLIT && key_group == 0 && speaks()) {
      out[row() * stride + D] = Out(peak);
      out[row() * stride + D + 1] = Out(all);
    }
    float factor = KEY_GROUPS > 1 ? exp2(top - peak) : 1.0f;
    if (!SPLIT) {
      factor = all == 0 ? 0.0f : factor / all;
    }
    threadgroup float* const parts = scratch + row_group * KEY_GROUPS * ROUND * D;
    UNROLL
    for (int r = 0; r < MINE; r += ROUND) {
      UNROLL
      for (int i = r; i < min(r + ROUND, MINE); ++i) {
        const float factor_of_row = simd_shuffle(factor, ushort(i));
        float x[EACH];
        UNROLL
        for (int e = 0; e < EACH; ++e) {
          x[e] = factor_of_row * sum_blocks<LANES, SIMD>(sum[i * EACH + e]);
        }
        const int row = row_group * MINE + i, first = lane * EACH;
        if (KEY_GROUPS > 1) {
          put(parts + (key_group * ROUND + i - r) * D, x, lane < LANES);
        } else if (row < ROWS && first < D) {
          UNROLL
          for (int e = 0; e < EACH; ++e) {
            out[row * stride + first + e] = Out(x[e]);
          }
        }
      }
      if (KEY_GROUPS > 1) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (int at = key_group * SIMD + lane; at < min(ROUND, MINE - r) * D; at += KEY_GROUPS * SIMD) {
          float value = 0;
          for (int i = 0; i < KEY_GROUPS; ++i) {
            value += parts[i * ROUND * D + at];
          }
          const int row = row_group * MINE + r + at / D;
          if (row < ROWS) {
            out[row * stride + at % D] = Out(value);
          }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
    }
  }
};
