// Where tensors begin and end. The translation turns x.data_ptr<T>() into
// ::cuda_on_cpu::noted(x).data_ptr<T>(), which notes the range before the pointer is handed out.
#pragma once
namespace cuda_on_cpu {

CUDA_ON_CPU_RUNTIME static void forget_freed_tensors() {
  auto freed = [](const auto& storage) { return storage.expired(); };
  auto& tensors = runtime.tensors;
  for (const TensorRange& range : tensors) {
    if (freed(range.storage)) runtime.freed.push_back({range.begin, range.end, range.memory});
  }
  constexpr size_t remembered = 64;
  if (runtime.freed.size() > remembered)
    runtime.freed.erase(runtime.freed.begin(), runtime.freed.end() - remembered);
  tensors.erase(std::remove_if(tensors.begin(), tensors.end(),
                               [&](const TensorRange& range) { return freed(range.storage); }),
                tensors.end());
  auto& empty = runtime.made_empty;
  empty.erase(std::remove_if(empty.begin(), empty.end(), freed), empty.end());
}

CUDA_ON_CPU_RUNTIME static void note_memory(const c10::intrusive_ptr<c10::StorageImpl>& storage,
                                            Address begin, size_t bytes, unsigned element_bytes,
                                            bool made_empty, Memory memory = Memory::both) {
  std::lock_guard<std::mutex> lock(runtime.mutex);
  forget_freed_tensors();
  TensorRange range = {begin, begin + bytes, static_cast<long>(bytes / element_bytes),
                       element_bytes, c10::weak_intrusive_ptr<c10::StorageImpl>(storage)};
  range.memory = memory;
#ifdef CUDA_ON_CPU_CHECKED
  range.held = storage;
  range.made_empty = made_empty;
#endif
  auto same = [&](const TensorRange& other) {
    return other.begin == range.begin && other.end == range.end;
  };
  auto& tensors = runtime.tensors;
  tensors.erase(std::remove_if(tensors.begin(), tensors.end(), same), tensors.end());
  tensors.insert(tensors.begin(), std::move(range));
}

CUDA_ON_CPU_RUNTIME static bool was_made_empty(const c10::StorageImpl* storage) {
  std::lock_guard<std::mutex> lock(runtime.mutex);
  auto& empty = runtime.made_empty;
  return std::any_of(empty.begin(), empty.end(),
                     [&](const auto& other) { return other._unsafe_get_target() == storage; });
}

CUDA_ON_CPU_RUNTIME static void note_tensor(const at::Tensor& tensor, const void* pointer) {
  // Strides may lead anywhere in the storage; elements that lie side by side stay within the
  // tensor.
  bool packed = tensor.is_contiguous();
  size_t bytes = packed ? tensor.nbytes() : tensor.storage().nbytes();
  Address begin = Address(packed ? pointer : tensor.storage().data());
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  note_memory(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage), begin, bytes,
              static_cast<unsigned>(tensor.element_size()), was_made_empty(storage));
}

// Whose memory lies there, and how many bytes of it come behind the address: those of the whole
// storage, not only those of a slice. What nobody knows is the host's; of __device__ variables the
// end is unknown.
extern "C" __attribute__((visibility("hidden"))) char __ehdr_start, _end;  // the built library

struct MemoryAt {
  Memory memory;
  size_t bytes_left;
};
static MemoryAt memory_at(Address address) {
  constexpr size_t unknown = ~size_t(0);
  for (const TensorRange& range : runtime.tensors) {
    if (address < range.begin || address >= range.end) continue;
    auto storage = range.storage.lock();
    if (storage) return {range.memory, Address(storage->data()) + storage->nbytes() - address};
  }
  bool in_library = address >= Address(&__ehdr_start) && address < Address(&_end);
  return {in_library ? Memory::both : Memory::host, unknown};
}

// Says who has freed the memory there; empty where nobody has.
static std::string freed_at(Address address) {
  auto inside = [&](const auto& range) { return range.begin <= address && address < range.end; };
  for (const TensorRange& range : runtime.tensors) {
    if (!inside(range)) continue;
    bool given_back = range.held && range.memory != Memory::both && range.held.use_count() == 1;
    return given_back ? "memory that cudaFree has freed" : "";
  }
  for (auto range = runtime.freed.rbegin(); range != runtime.freed.rend(); ++range) {
    if (inside(*range) && range->memory == Memory::gpu) return "memory that cudaFree has freed";
  }
  return "";
}

static inline const at::Tensor& noted(const at::Tensor& tensor) {
  note_tensor(tensor, tensor.data_ptr());
  return tensor;
}

// ---- Memory that nobody has written ----------------------------------------------------------

#ifndef CUDA_ON_CPU_CHECKED
static inline at::Tensor made_empty(at::Tensor tensor) { return tensor; }
static inline void fill_never_written(char*, size_t, unsigned) {}
#else

// What stands in an element of so many bytes until it is written: a NaN in each floating-point
// type.
CUDA_ON_CPU_RUNTIME static const void* never_written(unsigned element_bytes) {
  static constexpr std::uint64_t narrow[2] = {0x7fc17fc17fc17fc1, 0x7fc17fc17fc17fc1};
  static constexpr std::uint64_t wide[2] = {0x7ff87fc17fc17fc1, 0x7ff87fc17fc17fc1};
  return element_bytes < 8 ? narrow : wide;
}

CUDA_ON_CPU_RUNTIME static void fill_never_written(char* memory, size_t bytes, unsigned width) {
  const void* pattern = never_written(width);
  for (size_t at = 0; width <= 16 && at + width <= bytes; at += width) {
    std::memcpy(memory + at, pattern, width);
  }
}

// The translation turns torch::empty(...) into ::cuda_on_cpu::made_empty(torch::empty(...)).
CUDA_ON_CPU_RUNTIME static at::Tensor made_empty(at::Tensor tensor) {
  if (!tensor.is_cpu() || !tensor.numel() || tensor.scalar_type() == at::kBool) return tensor;
  fill_never_written(static_cast<char*>(tensor.storage().mutable_data()), tensor.storage().nbytes(),
                     static_cast<unsigned>(tensor.element_size()));
  std::lock_guard<std::mutex> lock(runtime.mutex);
  runtime.made_empty.push_back(tensor.storage().getWeakStorageImpl());
  return tensor;
}

#endif

// What a host function returns. A tensor of floats by torch::empty that is written in part is a
// mistake, such as a grid that is too small; one of which nothing is written may be a workspace.
#ifndef CUDA_ON_CPU_CHECKED
static inline at::Tensor whole(at::Tensor tensor) { return tensor; }
#else
static at::Tensor whole(at::Tensor tensor) {
  if (!tensor.is_cpu() || !at::isFloatingType(tensor.scalar_type())) return tensor;
  if (!was_made_empty(tensor.storage().unsafeGetStorageImpl())) return tensor;
  at::Tensor packed = tensor.contiguous();
  size_t width = packed.element_size(), elements = packed.numel(), unwritten = 0, first = 0;
  const char* data = static_cast<const char*>(packed.const_data_ptr());
  for (size_t k = elements; k-- > 0;) {
    if (std::memcmp(data + k * width, never_written(width), width)) continue;
    first = k;
    ++unwritten;
  }
  if (!unwritten || unwritten == elements) return tensor;
  raise("CUDA kernel " + std::string(runtime.kernel) +
            ", the last one: the tensor that is returned has " + std::to_string(elements) +
            " elements, and " + std::to_string(unwritten) +
            " of them nobody has written, element " + std::to_string(first) +
            " as the first: the grid may be too small\n  at " + runtime.launch_place.file + ":" +
            std::to_string(runtime.launch_place.line),
        cudaErrorLaunchFailure);
}
#endif

// ---- What a launch may touch -----------------------------------------------------------------

// Opens the range in which the address lies, if there is one that is not open yet.
CUDA_ON_CPU_RUNTIME static TensorRange* open_tensor_at(Address address,
                                                       std::string_view name = {}) {
  for (TensorRange& range : runtime.tensors) {
    bool inside = range.begin <= address && address < range.end;
    auto& open = runtime.visible_tensors;
    bool is_open = std::find(open.begin(), open.end(), &range) != open.end();
    if ((inside || address == range.begin) && !is_open) {
      open.push_back(&range);
      range.name = name;
      return &range;
    }
  }
  return nullptr;
}

// A kernel that is given a table of pointers, in a tensor of 64-bit integers, may touch what they
// point to.
CUDA_ON_CPU_RUNTIME static void open_pointers_in(const TensorRange& table) {
  std::vector<Address> values(std::min<size_t>((table.end - table.begin) / 8, 65536));
  std::memcpy(values.data(), reinterpret_cast<void*>(table.begin), 8 * values.size());
  for (Address value : values) {
    if (value) open_tensor_at(value);
  }
}

// A kernel may touch the tensors whose pointers it was given, and no other: the slice x[:100] ends
// after 100 elements, even where x goes on. Where x and x[:100] start at the same address, the one
// whose pointer was taken last is meant, and both if the kernel gets that address twice. A struct
// may hold pointers that we cannot see; then every tensor is open to it.
template <class Argument>
CUDA_ON_CPU_RUNTIME void open_tensor_of(const Argument& argument, std::string_view name,
                                        bool& all) {
  if constexpr (std::is_pointer_v<Argument>) {
    using Element = std::remove_cv_t<std::remove_pointer_t<Argument>>;
    TensorRange* range = open_tensor_at(Address(argument), name);
    if (!range && argument && memory_at(Address(argument)).memory == Memory::host)
      runtime.stray_pointers.push_back({Address(argument), name});
    // cudaMalloc gave bytes, for a void*: what they are the kernel says.
    if constexpr (!std::is_void_v<Element>) {
      if (range && range->memory != Memory::both && range->element_bytes == 1) {
        range->element_bytes = sizeof(Element);
        range->elements = static_cast<long>((range->end - range->begin) / sizeof(Element));
      }
    }
    if constexpr (std::is_pointer_v<Element> || std::is_integral_v<Element>) {
      if (range && sizeof(Element) == 8) open_pointers_in(*range);
    }
  } else if constexpr (std::is_class_v<Argument> || std::is_union_v<Argument>) {
    all = true;
  }
}

#ifdef CUDA_ON_CPU_CHECKED
// Raises where a tensor that this launch was given has been freed: nobody holds it but our notes of
// it.
CUDA_ON_CPU_RUNTIME static void refuse_freed_tensors() {
  for (const TensorRange* open : runtime.visible_tensors) {
    size_t ours = 0;
    for (const TensorRange& range : runtime.tensors) ours += range.held == open->held;
    if (!open->held || open->held.use_count() > ours) continue;
    runtime.failure = {};
    std::string name = open->name.empty() ? "" : "`" + std::string(open->name) + "` is ";
    runtime.failure.message =
        open->memory == Memory::gpu
            ? name + "a pointer to memory that cudaFree has freed"
            : name + "a pointer into a tensor of " + std::to_string(open->elements) +
                  " elements that has been freed: a temporary such as x.contiguous() lives to the "
                  "end of its statement; give it a name";
    runtime.failure.place = runtime.launch_place;
    for (TensorRange& range : runtime.tensors) range.held.reset();
    raise_failure();
  }
  for (TensorRange& range : runtime.tensors) range.held.reset();
}
#endif

// The next of `names`, which are separated by commas.
CUDA_ON_CPU_RUNTIME static std::string_view next_name(std::string_view& names) {
  std::string_view name = names.substr(0, names.find(','));
  names.remove_prefix(std::min(names.size(), name.size() + 1));
  return name;
}

template <class... Arguments>
CUDA_ON_CPU_RUNTIME void open_tensors(std::string_view names, const Arguments&... arguments) {
  forget_freed_tensors();
  runtime.visible_tensors.clear();
  runtime.stray_pointers.clear();
  bool all = false;
  (open_tensor_of(arguments, next_name(names), all), ...);
#ifdef CUDA_ON_CPU_CHECKED
  refuse_freed_tensors();
#endif
  if (!all) return;
  runtime.visible_tensors.clear();
  for (TensorRange& range : runtime.tensors) runtime.visible_tensors.push_back(&range);
}

}  // namespace cuda_on_cpu
