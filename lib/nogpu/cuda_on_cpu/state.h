// Everything the runtime remembers. One copy for each built source; the CPU thread that launches a
// kernel holds `mutex` until the kernel has ended. What each thread or access needs stands in plain
// arrays: in checked mode the functions of a std::vector are slow, because they are watched.
#pragma once
namespace cuda_on_cpu {

using Address = std::uintptr_t;

constexpr unsigned kWarpSize = 32;
constexpr unsigned kMaxThreads = 1024;               // of one thread block, as on every GPU
constexpr size_t kStackBytes = 256 << 10;            // for the local variables of one thread
constexpr size_t kSharedMemoryBytes = 48 << 10;      // what a block may use without asking
constexpr size_t kMaxSharedMemoryBytes = 227 << 10;  // what it may ask for, as on an H100
constexpr size_t kArenaBytes = 512 << 10;            // the latter, and gaps between variables

struct Place {  // a line of the .cu
  const char* file = nullptr;
  int line = 0;
};

enum class ThreadState : char { fresh, ready, at_barrier, in_warp, done };
enum class WarpCall : char {
  sync,
  shuffle,
  shuffle_up,
  shuffle_down,
  shuffle_xor,
  ballot,
  coalesce  // cooperative groups: which lanes have come here together?
};

struct Fiber {
  void* stack_pointer = nullptr;  // where the fiber stopped (x86-64)
  ucontext_t context;             // where the fiber stopped (elsewhere)
  char* stack = nullptr;
};

struct Thread {
  ThreadState state;
  WarpCall call;  // the warp intrinsic it waits in, with its arguments and its result
  unsigned mask;
  int argument, width;
  std::uint64_t value_in, value_out;
  Place place;  // the line where it waits
  Fiber* fiber;
  std::uint32_t seen[kWarpSize] =
      {};                // checked mode: what each lane did before this __syncwarp(), it has seen
  Address spin_address;  // checked mode: the address that it keeps reading, and how often
  unsigned spin_count;
  std::int64_t bytes_read;  // from tensors
};

// Whose a piece of memory is. A tensor may stand for one of the GPU or for one of the host: both.
enum class Memory : char { both, gpu, host };

struct TensorRange {  // memory that a host function has taken a pointer to
  Address begin, end;
  long elements;
  unsigned element_bytes;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // tells whether the memory still lives
  // Checked mode: until the next launch the memory is not given to another tensor.
  c10::intrusive_ptr<c10::StorageImpl> held = {};
  bool made_empty = false;  // by torch::empty
  Memory memory = Memory::both;
  std::string_view name = {};  // of the parameter by which the kernel got it
};

// A pointer that a kernel got, and that leads to no memory we know.
struct StrayPointer {
  Address address;
  std::string_view name;
};

struct FreedMemory {
  Address begin, end;
  Memory memory;
};

struct SharedVariable {
  Address begin, end;
  const char* name;
  unsigned element_bytes;
  bool dynamic;
};

struct Statistics {
  std::int64_t launches = 0, thread_blocks = 0, threads = 0, bytes_read = 0, bytes_written = 0;
  std::int64_t most_read_by_a_thread = 0, shared_bytes = 0;
};

struct Failure {
  bool found = false;
  std::string message;
  Place place;
  void* code_address = nullptr;  // instead of a place: the machine instruction that did it
};

struct Runtime {
  std::mutex mutex;

  // The launch.
  const char* kernel = "";
  Place launch_place;
  void (*body)(void*) = nullptr;  // calls the kernel for one thread
  void* arguments = nullptr;
  size_t arguments_bytes = 0;
  size_t dynamic_shared_bytes = 0;
  Address host_stack = 0;       // what a lambda of the launch refers to lies near here
  unsigned order[kMaxThreads];  // in which the threads of a block get their turns
  Failure failure;
  void* last_access = nullptr;  // of the kernel to memory: the address behind the call (checked mode)
  cudaError_t last_error = cudaSuccess;
  std::string last_error_detail;

  // The thread block that runs now.
  std::uint32_t block = 0;   // its number in the grid
  unsigned block_epoch = 0;  // counts thread blocks over all launches
  unsigned barriers_passed = 0;
  unsigned n_threads = 0, live_threads = 0;
  std::uint32_t warp_syncs = 0;  // counts __syncwarp() calls, of all warps and launches
  unsigned turn = 0;             // index into order
  int barrier_votes = 0;         // __syncthreads_count
  Thread threads[kMaxThreads];
  Thread* current = nullptr;
  Address current_stack = 0;  // where its local variables lie

  // Stacks.
  Fiber host;
  std::vector<Fiber*> all_fibers, idle_fibers;

  // Memory.
  char* arena = nullptr;  // the shared memory of the thread block
  size_t arena_used = 0, shared_bytes = 0, shared_limit = kSharedMemoryBytes;
  std::vector<SharedVariable> shared_variables;
  std::vector<TensorRange> tensors;           // the pointer taken last comes first
  std::vector<TensorRange*> visible_tensors;  // those that this launch got a pointer to
  std::vector<StrayPointer> stray_pointers;   // that this launch got
  std::vector<FreedMemory> freed;             // the latest
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>>
      made_empty;  // checked mode: by torch::empty
  Statistics statistics;
};
static Runtime runtime;

// Kernel code is running now, not the runtime or the host. Another CPU thread may be in host code
// at the same time.
static thread_local volatile bool in_kernel = false;

// Kernel code calls the runtime; while it is inside, its loads and stores are not the kernel's.
struct InsideRuntime {
  CUDA_ON_CPU_RUNTIME __attribute__((always_inline)) InsideRuntime() { in_kernel = false; }
  CUDA_ON_CPU_RUNTIME __attribute__((always_inline)) ~InsideRuntime() { in_kernel = true; }
};

CUDA_ON_CPU_RUNTIME static unsigned index_of(const Thread* thread) {
  return static_cast<unsigned>(thread - runtime.threads);
}
CUDA_ON_CPU_RUNTIME static uint3 coordinates(unsigned thread_index) {
  return {thread_index % blockDim.x, thread_index / blockDim.x % blockDim.y,
          thread_index / (blockDim.x * blockDim.y)};
}
CUDA_ON_CPU_RUNTIME static uint3 block_coordinates(std::uint32_t block) {
  return {block % gridDim.x, block / gridDim.x % gridDim.y,
          static_cast<unsigned>(block / (std::uint64_t(gridDim.x) * gridDim.y))};
}
CUDA_ON_CPU_RUNTIME static std::string name_of_thread(unsigned thread_index, std::uint32_t block) {
  uint3 t = coordinates(thread_index), b = block_coordinates(block);
  char text[128];
  snprintf(text, sizeof text, "thread (%u,%u,%u) of block (%u,%u,%u)", t.x, t.y, t.z, b.x, b.y,
           b.z);
  return text;
}
CUDA_ON_CPU_RUNTIME static std::string name_of_thread(const Thread* thread) {
  return name_of_thread(index_of(thread), runtime.block);
}

}  // namespace cuda_on_cpu
