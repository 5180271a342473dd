// Where tensors begin and end. The translation turns x.data_ptr<T>() into
// ::cuda_on_cpu::noted(x).data_ptr<T>(), which notes the range before the pointer is handed out.
#pragma once
namespace cuda_on_cpu {

CUDA_ON_CPU_RUNTIME static void forget_freed_tensors() {
  auto freed = [](const TensorRange& range) { return range.storage.expired(); };
  auto& tensors = runtime.tensors;
  tensors.erase(std::remove_if(tensors.begin(), tensors.end(), freed), tensors.end());
}

CUDA_ON_CPU_RUNTIME static void note_tensor(const at::Tensor& tensor, const void* pointer) {
  std::lock_guard<std::mutex> lock(runtime.mutex);
  forget_freed_tensors();
  // Strides may lead anywhere in the storage; elements that lie side by side stay within the
  // tensor.
  bool packed = tensor.is_contiguous();
  size_t bytes = packed ? tensor.nbytes() : tensor.storage().nbytes();
  Address begin = Address(packed ? pointer : tensor.storage().data());
  unsigned element_bytes = static_cast<unsigned>(tensor.element_size());
  TensorRange range = {begin, begin + bytes, static_cast<long>(bytes / element_bytes),
                       element_bytes, tensor.storage().getWeakStorageImpl()};
  auto same = [&](const TensorRange& other) {
    return other.begin == range.begin && other.end == range.end;
  };
  auto& tensors = runtime.tensors;
  tensors.erase(std::remove_if(tensors.begin(), tensors.end(), same), tensors.end());
  tensors.insert(tensors.begin(), std::move(range));
}

static inline const at::Tensor& noted(const at::Tensor& tensor) {
  note_tensor(tensor, tensor.data_ptr());
  return tensor;
}

// A kernel may touch the tensors whose pointers it was given, and no other: the slice x[:100] ends
// after 100 elements, even where x goes on. Where x and x[:100] start at the same address, the one
// whose pointer was taken last is meant, and both if the kernel gets that address twice. A struct
// may hold pointers that we cannot see; then every tensor is open to it.
template <class Argument>
CUDA_ON_CPU_RUNTIME void open_tensor_of(const Argument& argument, bool& all) {
  if constexpr (std::is_pointer_v<Argument>) {
    for (TensorRange& range : runtime.tensors) {
      Address address = Address(argument);
      bool inside = range.begin <= address && address < range.end;
      auto& open = runtime.visible_tensors;
      bool is_open = std::find(open.begin(), open.end(), &range) != open.end();
      if ((inside || address == range.begin) && !is_open) {
        open.push_back(&range);
        return;
      }
    }
  } else if constexpr (std::is_class_v<Argument> || std::is_union_v<Argument>) {
    all = true;
  }
}
template <class... Arguments>
CUDA_ON_CPU_RUNTIME void open_tensors(const Arguments&... arguments) {
  forget_freed_tensors();
  runtime.visible_tensors.clear();
  bool all = false;
  (open_tensor_of(arguments, all), ...);
  if (!all) return;
  for (TensorRange& range : runtime.tensors) runtime.visible_tensors.push_back(&range);
}

}  // namespace cuda_on_cpu
