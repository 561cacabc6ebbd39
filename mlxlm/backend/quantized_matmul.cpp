// Products with MLX's affine-quantized matrices on a CPU, as an operation of MLX.
//
// MLX's own reads 0.2 GB/s of weights. Few rows are multiplied while the weights are unpacked, in registers. For many, a
// block of the matrix after another is dequantized, and multiplied by the BLAS.
// mlxlm/backend/cpu_extension.py compiles this; the threads are those of blas_route.c.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"

namespace nb = nanobind;
namespace mx = mlx::core;

extern "C" {
void mlxlm_parallel_for(int chunks, void (*body)(void*, int), void* context);
void cblas_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float* a, int lda,
                 const float* b, int ldb, float beta, float* c, int ldc);
}

namespace {

enum { ROW_MAJOR = 101, NO_TRANS = 111, TRANS = 112 };
constexpr int FEW_ROWS = 32;           // that aren't multiplied by the BLAS
constexpr int CHUNK_SIZE = 1 << 15;    // weights that a thread takes at a time
constexpr int BLOCK_SIZE = 1 << 18;    // weights that are dequantized for the BLAS

typedef float Floats __attribute__((vector_size(32), aligned(4), may_alias));
typedef float FourFloats __attribute__((vector_size(16)));
typedef uint32_t Words __attribute__((vector_size(32)));
typedef int32_t Integers __attribute__((vector_size(32)));
typedef uint64_t LongWords __attribute__((vector_size(32)));
typedef uint8_t Bytes __attribute__((vector_size(32)));

inline Floats load(const float* p) { return *reinterpret_cast<const Floats*>(p); }

inline void store(float* p, Floats x) { *reinterpret_cast<Floats*>(p) = x; }

inline float sum(Floats x) {
  FourFloats halves[2];
  std::memcpy(halves, &x, sizeof x);
  FourFloats four = halves[0] + halves[1];
  return (four[0] + four[1]) + (four[2] + four[3]);
}

template <class Word>
inline Word read(const uint8_t* p) {
  Word word;
  std::memcpy(&word, p, sizeof word);
  return word;
}

// Where the bytes of 8 weights are, for `skipped` bytes before them, so that each of 8 words begins with one weight.
template <int bits, int... byte>
inline Bytes word_bytes(int skipped, std::integer_sequence<int, byte...>) {
  return Bytes{uint8_t(byte / 16 * 16 + std::min(7, skipped + byte / 4 * bits / 8 + byte % 4))...};
}

// Weights 8 i to 8 i + 7 of 32, which begin at `p`. Weight j has the bits from j * bits on, in little-endian order.
template <int bits, int i>
inline Floats unpack(const uint8_t* p) {
  Words words;
  if constexpr (bits == 4 || bits == 2) {
    words = (read<uint32_t>(p + bits * i / 4 * 4) - Words{}) >> (Words{0, 1, 2, 3, 4, 5, 6, 7} * bits + bits * i % 4 * 8);
  } else {
    constexpr int start = std::min(bits * i, 4 * bits - 8);  // of 8 bytes, none of which is behind the 32 weights
    auto bytes = (Bytes)(read<uint64_t>(p + start) - LongWords{});
    words = (Words)__builtin_shuffle(bytes, word_bytes<bits>(bits * i - start, std::make_integer_sequence<int, 32>()));
    words = words >> Words{0, bits % 8, 2 * bits % 8, 3 * bits % 8, 4 * bits % 8, 5 * bits % 8, 6 * bits % 8, 7 * bits % 8};
  }
  return __builtin_convertvector((Integers)(words & ((1 << bits) - 1)), Floats);
}

template <int i>
using Unit = std::integral_constant<int, i>;

// Calls body(Unit<i>()) for the four units of 8 weights in 32.
template <class Body>
inline void for_units(Body body) {
  body(Unit<0>());
  body(Unit<1>());
  body(Unit<2>());
  body(Unit<3>());
}

#ifdef __FLT16_MAX__
typedef _Float16 Half;
#else
typedef mx::float16_t Half;
#endif

struct BFloat {
  uint16_t bits;
  operator float() const {
    uint32_t word = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &word, sizeof value);
    return value;
  }
};

// A product of x [M, K] and the transpose of a matrix [N, K] with a scale and a bias for each `group` of a row's weights.
struct Product {
  const float* x;
  const uint8_t* weights;
  const void *scales, *biases;
  float* out;
  mx::Dtype scale_type;
  int rows, outputs, inputs, group, bits;

  int64_t row_bytes() const { return int64_t(inputs) * bits / 8; }
};

// Scales or biases `first` to `first + count`, as floats: where they are, or in `buffer`.
const float* to_floats(const void* values, mx::Dtype type, int64_t first, int count, float* buffer) {
  if (type == mx::float32) return static_cast<const float*>(values) + first;
  if (type == mx::float16)
    std::copy_n(static_cast<const Half*>(values) + first, count, buffer);
  else
    std::copy_n(static_cast<const BFloat*>(values) + first, count, buffer);
  return buffer;
}

// Rows `row` to `row + rows` of the output, in the columns of rows `begin` to `end` of the matrix.
template <int bits, int rows>
void multiply_rows(const Product& p, int row, int begin, int end) {
  constexpr int chains = std::min(4, 8 / rows);  // of sums that don't wait for each other
  int groups = p.inputs / p.group;
  std::vector<float> buffers(2 * groups);
  for (int n = begin; n < end; n++) {
    const uint8_t* packed = p.weights + n * p.row_bytes();
    const float* scales = to_floats(p.scales, p.scale_type, int64_t(n) * groups, groups, &buffers[0]);
    const float* biases = to_floats(p.biases, p.scale_type, int64_t(n) * groups, groups, &buffers[groups]);
    const float* x = p.x + int64_t(row) * p.inputs;
    Floats sums[rows][chains] = {};
    for (int g = 0; g < groups; g++)
      for (int k = 0; k < p.group; k += 32, x += 32, packed += 4 * bits) {
        Floats scale = scales[g] - Floats{}, bias = biases[g] - Floats{};
        for_units([&]<int i>(Unit<i>) {
          Floats weights = unpack<bits, i>(packed) * scale + bias;
          for (int m = 0; m < rows; m++) sums[m][i % chains] += weights * load(x + int64_t(m) * p.inputs + 8 * i);
        });
      }
    for (int m = 0; m < rows; m++) {
      Floats total = sums[m][0];
      for (int i = 1; i < chains; i++) total += sums[m][i];
      p.out[int64_t(row + m) * p.outputs + n] = sum(total);
    }
  }
}

// Rows `begin` to `end` of the matrix, as floats.
template <int bits>
void dequantize(const Product& p, int begin, int end, float* out) {
  int groups = p.inputs / p.group;
  std::vector<float> buffers(2 * groups);
  const uint8_t* packed = p.weights + begin * p.row_bytes();
  for (int n = begin; n < end; n++) {
    const float* scales = to_floats(p.scales, p.scale_type, int64_t(n) * groups, groups, &buffers[0]);
    const float* biases = to_floats(p.biases, p.scale_type, int64_t(n) * groups, groups, &buffers[groups]);
    for (int g = 0; g < groups; g++)
      for (int k = 0; k < p.group; k += 32, packed += 4 * bits, out += 32)
        for_units([&]<int i>(Unit<i>) { store(out + 8 * i, unpack<bits, i>(packed) * scales[g] + biases[g]); });
  }
}

// Calls body(begin, end) for parts of the rows of a matrix, on all threads.
template <class Body>
void for_rows(int rows, int inputs, const Body& body) {
  struct Loop {
    const Body& body;
    int rows, step;
  } loop = {body, rows, CHUNK_SIZE / inputs + 1};
  auto run = [](void* context, int i) {
    auto& [body, rows, step] = *static_cast<Loop*>(context);
    body(i * step, std::min(rows, (i + 1) * step));
  };
  mlxlm_parallel_for((rows + loop.step - 1) / loop.step, run, &loop);
}

template <int bits>
void multiply(const Product& p) {
  if (p.rows <= FEW_ROWS) {
    for_rows(p.outputs, p.inputs, [&](int begin, int end) {
      int row = 0;
      for (; row + 8 <= p.rows; row += 8) multiply_rows<bits, 8>(p, row, begin, end);
      switch (p.rows - row) {  // all at once, since unpacking a weight costs as much as its products with two rows
        case 1: multiply_rows<bits, 1>(p, row, begin, end); break;
        case 2: multiply_rows<bits, 2>(p, row, begin, end); break;
        case 3: multiply_rows<bits, 3>(p, row, begin, end); break;
        case 4: multiply_rows<bits, 4>(p, row, begin, end); break;
        case 5: multiply_rows<bits, 5>(p, row, begin, end); break;
        case 6: multiply_rows<bits, 6>(p, row, begin, end); break;
        case 7: multiply_rows<bits, 7>(p, row, begin, end);
      }
    });
  } else {
    int step = std::max(1, BLOCK_SIZE / p.inputs);
    static thread_local std::vector<float> block;  // kept: the system would clear each new one
    block.resize(std::max<size_t>(block.size(), int64_t(step) * p.inputs));
    float* floats = block.data();
    for (int first = 0; first < p.outputs; first += step) {
      int count = std::min(step, p.outputs - first);
      for_rows(count, p.inputs, [&](int begin, int end) {
        dequantize<bits>(p, first + begin, first + end, floats + int64_t(begin) * p.inputs);
      });
      cblas_sgemm(ROW_MAJOR, NO_TRANS, TRANS, p.rows, count, p.inputs, 1, p.x, p.inputs, floats, p.inputs, 0,
                  p.out + first, p.outputs);
    }
  }
}

void multiply(const Product& p) {
  switch (p.bits) {
    case 2:
      return multiply<2>(p);
    case 3:
      return multiply<3>(p);
    case 4:
      return multiply<4>(p);
    case 5:
      return multiply<5>(p);
    case 6:
      return multiply<6>(p);
    default:
      return multiply<8>(p);
  }
}

// Inputs: x [..., K], a matrix [N, K * bits / 32], its scales and biases [N, K / group]. Or x [B, M, K], stacks of these,
// and the index of the matrix for each block of x, [B]. Output: [..., N].
class QuantizedMatmul : public mx::Primitive {
 public:
  QuantizedMatmul(mx::Stream stream, int group, int bits) : Primitive(stream), group_(group), bits_(bits) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto &x = inputs[0], &weights = inputs[1], &scales = inputs[2];
    mx::array& out = outputs[0];
    out.set_data(mx::allocator::malloc(out.nbytes()));
    int width = x.shape(-1), blocks = inputs.size() == 5 ? x.shape(0) : 1;
    int rows = blocks ? x.size() / width / blocks : 0;
    Product p = {x.data<float>(), weights.data<uint8_t>(), scales.data<void>(), inputs[3].data<void>(),
                 out.data<float>(), scales.dtype(), rows, weights.shape(-2), width, group_, bits_};
    auto run = [p, blocks, matrices = inputs.size() == 5 ? inputs[4].data<uint32_t>() : nullptr] {
      int64_t scale_bytes = int64_t(p.outputs) * (p.inputs / p.group) * p.scale_type.size();
      for (int i = 0; i < blocks; i++) {
        Product block = p;
        int64_t matrix = matrices ? matrices[i] : 0;
        block.weights += matrix * p.outputs * p.row_bytes();
        block.scales = static_cast<const char*>(p.scales) + matrix * scale_bytes;
        block.biases = static_cast<const char*>(p.biases) + matrix * scale_bytes;
        block.x += int64_t(i) * p.rows * p.inputs;
        block.out += int64_t(i) * p.rows * p.outputs;
        multiply(block);
      }
    };
    auto& encoder = mx::cpu::get_command_encoder(stream());
    for (auto& input : inputs) encoder.set_input_array(input);
    encoder.set_output_array(out);
    if (out.size()) encoder.dispatch(run);
  }

  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("[quantized_matmul] Only for a CPU.");
  }

  const char* name() const override { return "CpuQuantizedMatmul"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    auto& o = static_cast<const QuantizedMatmul&>(other);
    return group_ == o.group_ && bits_ == o.bits_;
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    mx::Shape shape = inputs[0].shape();
    shape.back() = inputs[1].shape(-2);
    return {shape};
  }

 private:
  int group_, bits_;
};

mx::array contiguous(const mx::array& x, mx::Stream stream) {
  return x.is_available() && x.flags().row_contiguous ? x : mx::contiguous(x, false, stream);
}

// The arguments are those of a model whose shapes were checked.
mx::array quantized_matmul(const mx::array& x, const mx::array& weights, const mx::array& scales,
                           const mx::array& biases, const std::optional<mx::array>& matrices, int group_size,
                           int bits) {
  mx::Stream stream = mx::default_stream(mx::Device::cpu);
  std::vector<mx::array> inputs;
  for (const mx::array& input : {x, weights, scales, biases}) inputs.push_back(contiguous(input, stream));
  if (matrices) inputs.push_back(contiguous(*matrices, stream));
  auto primitive = std::make_shared<QuantizedMatmul>(stream, group_size, bits);
  mx::Shape shape = primitive->output_shapes(inputs)[0];
  return mx::array(shape, mx::float32, primitive, std::move(inputs));
}

}  // namespace

NB_MODULE(mlxlm_cpu, module) {
  module.def("quantized_matmul", &quantized_matmul, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(),
             nb::arg(), nb::arg());
}
