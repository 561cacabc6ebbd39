// Lists the graph of lazy arrays: one JSON object a line for each array without a primitive and for each primitive, in
// the order of evaluation. MLX's Python module has nothing that tells the shapes and arguments inside a graph.
#include <functional>
#include <sstream>
#include <unordered_set>

#include "mlx/array.h"
#include "mlx/primitives.h"

using namespace mlx::core;

namespace {

template <typename T>
std::string list(const T& values) {
  std::ostringstream text;
  for (auto value : values)
    text << (text.tellp() ? "," : "[") << value;
  return text.tellp() ? text.str() + "]" : "[]";
}

// `references` holds x: those of Python, of other operations' inputs, and of compiled functions.
std::string described(const array& x, long references) {
  std::ostringstream text;
  text << "{\"id\":" << x.id() << ",\"shape\":" << list(x.shape()) << ",\"itemsize\":" << x.itemsize()
       << ",\"references\":" << references;
  if (x.is_available())
    text << ",\"strides\":" << list(x.strides());
  if (x.is_available() && x.dtype() == uint8) // the name of a stand-in
    text << ",\"data\":" << list(std::vector<int>(x.data<uint8_t>(), x.data<uint8_t>() + x.data_size()));
  return text.str() + "}";
}

long count_references(const array& x) { // an array is one shared pointer
  return reinterpret_cast<const std::shared_ptr<void>*>(&x)->use_count();
}

// By name, since the type information of MLX's primitives is hidden.
std::string arguments(const Primitive& primitive) {
  std::string name = primitive.name();
  if (name == "Transpose")
    return list(static_cast<const Transpose&>(primitive).state());
  if (name == "ExpandDims")
    return list(static_cast<const ExpandDims&>(primitive).state());
  if (name == "Squeeze")
    return list(static_cast<const Squeeze&>(primitive).state());
  if (name == "Slice")
    return list(std::get<2>(static_cast<const Slice&>(primitive).state())); // steps
  if (name == "Sum" || name == "Prod" || name == "Min" || name == "Max" || name == "And" || name == "Or")
    return list(static_cast<const Reduce&>(primitive).state().second); // axes
  if (name == "Sort")
    return list(std::vector{static_cast<const Sort&>(primitive).state()});
  if (name == "ArgSort")
    return list(std::vector{static_cast<const ArgSort&>(primitive).state()});
  if (name == "Partition")
    return list(std::vector{static_cast<const Partition&>(primitive).state().second});
  if (name == "ArgPartition")
    return list(std::vector{static_cast<const ArgPartition&>(primitive).state().second});
  if (name == "QuantizedMatmul") {
    auto [group_size, bits, mode, transpose] = static_cast<const QuantizedMatmul&>(primitive).state();
    return list(std::vector<int>{group_size, bits, transpose});
  }
  return "[]";
}

} // namespace

// The result is valid until the next call.
extern "C" const char* describe_graph(const array** outputs, int count) {
  static std::string result;
  std::ostringstream text;
  std::unordered_set<std::uintptr_t> seen;
  std::function<void(const array&)> visit = [&](const array& x) {
    if (!seen.insert(x.id()).second)
      return;
    if (!x.has_primitive() || x.is_available()) {
      text << "{\"leaf\":" << described(x, count_references(x)) << "}\n";
      return;
    }
    for (auto& input : x.inputs())
      visit(input);
    text << "{\"name\":\"" << x.primitive().name() << "\",\"arguments\":" << arguments(x.primitive())
         << ",\"inputs\":[";
    for (size_t i = 0; i < x.inputs().size(); i++)
      text << (i ? "," : "") << x.inputs()[i].id();
    text << "],\"outputs\":[";
    auto siblings = x.outputs(); // copies; and each output of several is held by the others
    for (size_t i = 0; i < siblings.size(); i++) {
      seen.insert(siblings[i].id());
      text << (i ? "," : "") << described(siblings[i], count_references(siblings[i]) - siblings.size());
    }
    text << "]}\n";
  };
  for (int i = 0; i < count; i++)
    visit(*outputs[i]);
  result = text.str();
  return result.c_str();
}
