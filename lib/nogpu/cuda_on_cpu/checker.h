// Checked mode: every load and store of a kernel comes by here (hooks.h) and is held to four rules.
//   1. It lies in a tensor that the kernel was given, or in one shared variable.
//   2. Shared memory, and what torch::empty made, is written before it is read.
//   3. Two threads that touch the same byte, one of them writing, have a barrier between them.
//   4. A thread does not wait for ever for a byte to change.
// Memory of a thread's own (local variables, arguments) is not checked.
//
// Rule 3 looks at the order that barriers promise, not at the order that happened to come about, so
// a race is found even where the answer was right. Two kinds are let pass, as right programs have
// them: the read with which a loop of atomicCAS begins, and threads that all store one value. What
// is not judged: a plain access beside an atomic one of another thread block, and what passes
// between thread blocks by __threadfence() and an atomic operation; both can be right, and telling
// when needs more than this.
//
// All rules take half a microsecond an access. A build without a wish (checked=None) holds the first
// half million accesses of each launch to all of them, and the rest to rules 1 and 4 and to the second
// half of 2, which take nanoseconds.
#pragma once
namespace cuda_on_cpu {

// atomicExch() reads too, but what it replaces may be anything: it often initialises a lock.
enum class Access { read, write, atomic_update, atomic_exchange };

#ifndef CUDA_ON_CPU_CHECKED

static inline void start_checking() {}
static inline void settle_suspicion() {}
static inline void note_fence() {}
static inline void forget_passed_ranges() {}
static inline void access(const void*, size_t, Access, void*) {}

#else

CUDA_ON_CPU_RUNTIME static bool needs_a_value(Access kind) {
  return kind == Access::read || kind == Access::atomic_update;
}
CUDA_ON_CPU_RUNTIME static bool is_atomic(Access kind) {
  return kind == Access::atomic_update || kind == Access::atomic_exchange;
}

// What a rule says of an access that it forbids; null where all is well. Not a std::string, because
// making one takes longer than checking most accesses.
using Broken = const std::string*;
CUDA_ON_CPU_RUNTIME static Broken broken(std::string message) {
  static std::string latest;
  latest = std::move(message);
  return &latest;
}

// Who touched a byte, and when, counted in the barriers passed since the thread block began.
struct Mark {
  static constexpr std::uint16_t several_threads = 1, several_warps = 2, several_blocks = 4;

  std::uint32_t block = 0;  // its number in the grid + 1; 0: nobody yet
  std::uint32_t barriers = 0;
  std::uint32_t warp_syncs = 0;  // the count of __syncwarp() at the time
  std::uint32_t lanes = 0;       // of its warp
  std::uint16_t thread : 10 = 0;
  std::uint16_t several : 6 = 0;  // the mark stands for several accesses
};

// For each byte: the last write, and the reads and the atomic updates since.
struct ByteHistory {
  Mark write, reads, atomics;
};

constexpr size_t kPageBytes = 4096;
static std::unordered_map<Address, std::unique_ptr<ByteHistory[]> > history_pages;
static Address latest_page = ~Address(0);
static ByteHistory* latest_history = nullptr;

// A race is one unless what the thread does next shows otherwise: after a read an atomicCAS of the
// same element, after a store that the value was there already.
struct Suspicion {
  bool pending = false;
  std::string message;
  Access kind;
  Address address;
  size_t bytes;
  char before[16];
  void* code_address;
};
static Suspicion suspicion;

// The read before this access: an atomicCAS takes it back, as the loop goes on until nothing came
// between.
struct LatestRead {
  Address address = 0;
  size_t bytes = 0;
  unsigned thread = 0;
};
static LatestRead latest_read;

#ifdef CUDA_ON_CPU_CHECKED_FIRST
constexpr std::uint64_t kFullChecks = CUDA_ON_CPU_CHECKED_FIRST;
#else
constexpr std::uint64_t kFullChecks = ~std::uint64_t(0);
#endif
static std::uint64_t full_checks_left = 0;

// The memory in which an instruction has been let pass: mostly it comes back to it.
struct PassedRange {
  void* code_address;
  Address begin;
  size_t bytes;
  enum Kind { own_memory, shared, tensor } kind;
};
static PassedRange passed_ranges[256];

CUDA_ON_CPU_RUNTIME static void let_pass(void* code_address, Address begin, size_t bytes,
                                         PassedRange::Kind kind) {
  passed_ranges[Address(code_address) % 256] = {code_address, begin, bytes, kind};
}

static bool block_used_atomics = false;  // the thread block that runs now
static std::uint32_t block_of_flag = 0;
static std::unordered_set<std::uint32_t> blocks_with_fence;  // those that called __threadfence()

// At the start of a launch, and of a thread block whose shared variables may lie elsewhere.
CUDA_ON_CPU_RUNTIME static void forget_passed_ranges() {
  std::memset(passed_ranges, 0, sizeof passed_ranges);
}

CUDA_ON_CPU_RUNTIME static void start_checking() {
  history_pages.clear();  // the launches of a stream are ordered: each starts afresh
  latest_page = ~Address(0);
  blocks_with_fence.clear();
  block_of_flag = 0;
  suspicion.pending = false;
  latest_read = {};
  full_checks_left = kFullChecks;
  forget_passed_ranges();
}

CUDA_ON_CPU_RUNTIME static void note_fence() {
  InsideRuntime inside;
  blocks_with_fence.insert(runtime.block + 1);
}

CUDA_ON_CPU_RUNTIME static ByteHistory& history_of(Address address) {
  Address page = address / kPageBytes;
  if (page != latest_page) {
    auto& histories = history_pages[page];
    if (!histories) histories.reset(new ByteHistory[kPageBytes]());
    latest_page = page;
    latest_history = histories.get();
  }
  return latest_history[address % kPageBytes];
}

CUDA_ON_CPU_RUNTIME static Mark mark_of_current_thread() {
  Mark mark;
  mark.block = runtime.block + 1;
  mark.barriers = runtime.barriers_passed;
  mark.warp_syncs = runtime.warp_syncs;
  mark.thread = index_of(runtime.current);
  mark.lanes = 1u << mark.thread % kWarpSize;
  return mark;
}

// Did thread block `block` say, by a fence, that it was ready, and has this one asked, by an
// atomic?
CUDA_ON_CPU_RUNTIME static bool published_by(const Mark& mark) {
  if (!block_used_atomics || block_of_flag != runtime.block + 1) return false;
  return mark.several & Mark::several_blocks || blocks_with_fence.count(mark.block) > 0;
}

// Has the current thread met each lane of `mark` in a __syncwarp() since?
CUDA_ON_CPU_RUNTIME static bool seen_by_current_lane(const Mark& mark) {
  unsigned others = mark.lanes & ~(1u << index_of(runtime.current) % kWarpSize);
  for (; others; others &= others - 1) {
    if (runtime.current->seen[__builtin_ctz(others)] <= mark.warp_syncs) return false;
  }
  return true;
}

// Is it certain that the accesses of `earlier` came before `now`, that of the current thread?
CUDA_ON_CPU_RUNTIME static bool ordered(const Mark& earlier, const Mark& now) {
  if (earlier.block == 0) return true;
  if (earlier.several & Mark::several_blocks || earlier.block != now.block) {
    return published_by(earlier);
  }
  if (earlier.thread == now.thread && !(earlier.several & Mark::several_threads)) return true;
  if (earlier.barriers != now.barriers) return true;
  bool same_warp = earlier.thread / kWarpSize == now.thread / kWarpSize &&
                   !(earlier.several & Mark::several_warps);
  return same_warp && seen_by_current_lane(earlier);
}

// Adds the access `now` to those that `mark` stands for.
CUDA_ON_CPU_RUNTIME static void add(Mark& mark, const Mark& now) {
  if (ordered(mark, now)) {
    mark = now;
  } else if (mark.block != now.block) {
    mark.several |= Mark::several_blocks;
  } else {
    bool other_warp = mark.thread / kWarpSize != now.thread / kWarpSize;
    mark.several |= Mark::several_threads | (other_warp ? Mark::several_warps : 0);
    mark.lanes |= now.lanes;
    mark.warp_syncs = now.warp_syncs;
  }
}

CUDA_ON_CPU_RUNTIME static std::string name_of(const Mark& mark) {
  if (mark.several & Mark::several_blocks) return "a thread of another block";
  if (mark.several & Mark::several_threads) return "another thread of the block";
  return name_of_thread(mark.thread, mark.block - 1);
}

// ---- Rule 1: where does the access lie? -----------------------------------------------------

struct Location {
  enum Kind { tensor, shared, device_variable, nowhere } kind = nowhere;
  const TensorRange* range = nullptr;
  const SharedVariable* variable = nullptr;
};

// The pointer of the host's that leads there, if the kernel got one.
CUDA_ON_CPU_RUNTIME static const StrayPointer* stray_at(Address address) {
  constexpr size_t reach = 64 << 20;  // of an index
  const StrayPointer *best = nullptr, *pointer = runtime.stray_pointers.data();
  for (size_t k = 0, n = runtime.stray_pointers.size(); k < n; ++k, ++pointer) {
    bool leads_there = address >= pointer->address && address - pointer->address < reach;
    if (leads_there && (!best || pointer->address > best->address)) best = pointer;
  }
  return best;
}

// The arguments of the kernel, threadIdx. Like local variables they are the thread's own.
CUDA_ON_CPU_RUNTIME static bool was_handed_over(Address address, void* code_address) {
  constexpr size_t below_launch = 64 << 10, around_launch = 1 << 20;
  if (address - Address(&builtin) < sizeof builtin) {
    let_pass(code_address, Address(&builtin), sizeof builtin, PassedRange::own_memory);
    return true;
  }
  bool argument = address - Address(runtime.arguments) < runtime.arguments_bytes;
  bool near = address - (runtime.host_stack - below_launch) < around_launch;
  if (!argument && (!near || stray_at(address))) return false;
  if (!runtime.stray_pointers.empty()) return true;  // not to be let pass without asking
  let_pass(code_address, runtime.host_stack - below_launch, around_launch,
           PassedRange::own_memory);
  return true;
}

CUDA_ON_CPU_RUNTIME static Location locate(Address address, size_t bytes) {
  Location location;
  if (address - Address(runtime.arena) < kArenaBytes) {
    for (const SharedVariable& variable : runtime.shared_variables) {
      if (address >= variable.begin && address + bytes <= variable.end) {
        location.kind = Location::shared;
        location.variable = &variable;
      }
    }
    return location;
  }
  TensorRange* const* open = runtime.visible_tensors.data();
  for (size_t k = 0, n = runtime.visible_tensors.size(); k < n; ++k) {
    if (address >= open[k]->begin && address + bytes <= open[k]->end) {
      location.kind = Location::tensor;
      location.range = open[k];
      return location;
    }
  }
  if (address >= Address(&__ehdr_start) && address < Address(&_end)) {
    location.kind = Location::device_variable;  // __device__, __constant__: their ends are unknown
  }
  return location;
}

// `begin` may lie before or behind the address: a negative index is a small negative number.
CUDA_ON_CPU_RUNTIME static std::string element_number(Address address, Address begin,
                                                      unsigned size) {
  long long offset = static_cast<long long>(address - begin), width = size;
  return std::to_string(offset < 0 ? -((-offset + width - 1) / width) : offset / width);
}

CUDA_ON_CPU_RUNTIME static std::string name_of(const TensorRange& range, Address address) {
  return "element " + element_number(address, range.begin, range.element_bytes) + " of " +
         (range.name.empty() ? "" : "`" + std::string(range.name) + "`, ") +
         (range.memory == Memory::gpu ? "memory of cudaMalloc" : "a tensor") + " with " +
         std::to_string(range.elements) + " elements";
}

// The range whose nearer end is closest to the address.
template <class Range>
CUDA_ON_CPU_RUNTIME Address gap(const Range& range, Address address) {
  return address < range.begin ? range.begin - address : address - range.begin;
}

CUDA_ON_CPU_RUNTIME static const char* verb(Access kind) {
  if (kind == Access::read) return "read";
  return kind == Access::write ? "write" : "atomic update";
}

CUDA_ON_CPU_RUNTIME static std::string out_of_bounds(Address address, size_t bytes, Access kind) {
  std::string text =
      "out-of-bounds " + std::string(verb(kind)) + " of " + std::to_string(bytes) + " bytes";
  if (address - Address(runtime.arena) < kArenaBytes) {
    const SharedVariable* nearest = nullptr;
    for (const SharedVariable& variable : runtime.shared_variables) {
      if (!nearest || gap(variable, address) < gap(*nearest, address)) nearest = &variable;
    }
    if (!nearest) return text + " in shared memory";
    size_t elements = (nearest->end - nearest->begin) / nearest->element_bytes;
    return text + " at element " + element_number(address, nearest->begin, nearest->element_bytes) +
           " of shared memory `" + nearest->name + "` with " + std::to_string(elements) +
           " elements" +
           (nearest->dynamic ? " (the third number in <<<>>> gives " +
                                   std::to_string(runtime.dynamic_shared_bytes) + " bytes)"
                             : "");
  }
  if (address < kPageBytes) return text + " through a null pointer";
  for (const Fiber* fiber : runtime.all_fibers) {
    if (address - Address(fiber->stack) < kStackBytes) {
      return text +
             " in local variables of another thread: a pointer to them means something to their "
             "own thread alone";
    }
  }
  const TensorRange* nearest = nullptr;
  const StrayPointer* stray = stray_at(address);
  // Just behind the end of one is more likely than far before the start of another.
  auto distance = [&](const TensorRange& range) -> Address {
    if (address < range.begin) return range.begin - address;
    return address < range.end ? 0 : address - range.end + 1;
  };
  for (const TensorRange* range : runtime.visible_tensors) {
    if (stray && range->begin > stray->address && range->begin <= address) stray = nullptr;
    if (!nearest || distance(*range) < distance(*nearest)) nearest = range;
  }
  // Beside a tensor of the kernel's, that some other memory once lay there says nothing.
  bool beside_one = nearest && distance(*nearest) < kPageBytes;
  if (std::string freed = freed_at(address); !freed.empty() && !beside_one)
    return text + " in " + freed;
  if (stray) {
    std::string name = stray->name.empty() ? "a pointer" : "`" + std::string(stray->name) + "`";
    return text + ": " + name +
           " points to memory of the host, or beside all that was allocated: a kernel reaches "
           "tensors and what cudaMalloc gave";
  }
  if (!nearest) return text + " (the kernel was given no tensor)";
  return text + " at " + name_of(*nearest, address);
}

CUDA_ON_CPU_RUNTIME static std::string name_of(const Location& location, Address address) {
  if (location.kind == Location::shared) {
    const SharedVariable& variable = *location.variable;
    return "element " + element_number(address, variable.begin, variable.element_bytes) +
           " of shared memory `" + variable.name + "`";
  }
  if (location.kind == Location::tensor) {
    return name_of(*location.range, address);
  }
  return "a __device__ variable";
}

// ---- Rule 2 for tensors: what torch::empty made holds a pattern, a NaN, until it is written --

CUDA_ON_CPU_RUNTIME static Broken check_written(Address address, size_t bytes,
                                                     const TensorRange& range) {
  unsigned width = range.element_bytes;
  if (!range.made_empty || width < 2 || width > 16) return nullptr;
  Address element = address - (address - range.begin) % width;
  for (; element + width <= address + bytes; element += width) {
    if (element < address) continue;  // a part of one
    void* value = reinterpret_cast<void*>(element);
    if (std::memcmp(value, never_written(width), width) &&
        std::memcmp(value, never_written(2), width))
      continue;
    return broken("read of " + name_of(range, element) +
                  " that nobody has written since it was allocated; " +
                  (range.memory == Memory::gpu ? "cudaMemset" : "torch::zeros") + " writes zeros");
  }
  return nullptr;
}

// ---- Rule 3: what looks like a race, and is none ---------------------------------------------

CUDA_ON_CPU_RUNTIME static inline void settle_suspicion() {
  if (!suspicion.pending) return;
  suspicion.pending = false;
  bool same_value =
      suspicion.kind == Access::write &&
      !std::memcmp(suspicion.before, reinterpret_cast<void*>(suspicion.address), suspicion.bytes);
  if (!same_value) fail_in_kernel(suspicion.message, {}, suspicion.code_address);
}

CUDA_ON_CPU_RUNTIME static void suspect(Broken rule, Access kind, Address address, size_t bytes,
                                        void* code_address) {
  suspicion = {true, *rule, kind, address, bytes, {}, code_address};
  std::memcpy(suspicion.before, reinterpret_cast<void*>(address), bytes);
}

// An atomic operation right after a read of the same element, by the same thread.
CUDA_ON_CPU_RUNTIME static void take_back_read(Address address, size_t bytes) {
  LatestRead& read = latest_read;
  if (read.address != address || read.bytes != bytes || read.thread != index_of(runtime.current))
    return;
  for (size_t i = 0; i < bytes; ++i) {
    Mark& reads = history_of(address + i).reads;
    if (reads.thread == read.thread && !reads.several) reads = Mark();
  }
  if (suspicion.kind == Access::read && suspicion.address == address) suspicion.pending = false;
}

// ---- Rules 2 and 3: one byte ----------------------------------------------------------------

CUDA_ON_CPU_RUNTIME static Broken race(Access kind, const Location& location, Address address,
                                            const char* other_kind, const Mark& other) {
  std::string here = std::string(verb(kind)) + " of " + name_of(location, address);
  bool other_block = other.several & Mark::several_blocks || other.block != runtime.block + 1;
  if (other_block) {
    return broken("race between thread blocks: nothing orders this " + here + " after the " +
                  other_kind + " by " + name_of(other));
  }
  return broken("race: no barrier separates this " + here + " from the " + other_kind + " by " +
                name_of(other));
}

// `excusable`: whether a race, where there is one, may turn out to be none.
CUDA_ON_CPU_RUNTIME static Broken check_byte(Address address, Access kind,
                                                  const Location& location, const Mark& now,
                                                  bool& excusable) {
  ByteHistory& history = history_of(address);
  bool shared = location.kind == Location::shared;
  auto of_this_block = [&](const Mark& mark) { return mark.block == now.block; };
  if (shared && !of_this_block(history.write) && !of_this_block(history.atomics)) {
    history = ByteHistory();  // shared memory begins anew with each thread block
    if (needs_a_value(kind))
      return broken(std::string(verb(kind)) + " of uninitialised " + name_of(location, address));
  }
  if (!ordered(history.write, now)) {
    Broken rule = race(kind, location, address, "write", history.write);
    excusable =
        kind == Access::write && ordered(history.reads, now) && ordered(history.atomics, now);
    if (excusable) history.write = now;
    return rule;
  }
  if (kind != Access::read && !ordered(history.reads, now)) {
    return race(kind, location, address, "read", history.reads);
  }
  bool atomics_of_other_blocks =
      history.atomics.several & Mark::several_blocks || !of_this_block(history.atomics);
  if (!is_atomic(kind) && !ordered(history.atomics, now) && !atomics_of_other_blocks) {
    Broken rule = race(kind, location, address, "atomic update", history.atomics);
    excusable = kind == Access::read;
    if (excusable) add(history.reads, now);
    return rule;
  }
  if (kind == Access::write) {
    history.write = now;
    history.reads = history.atomics = Mark();
  } else {
    add(kind == Access::read ? history.reads : history.atomics, now);
  }
  return nullptr;
}

// ---- Rule 4 ---------------------------------------------------------------------------------

// Reading one address over and over: let the others run, and after ten rounds give up.
CUDA_ON_CPU_RUNTIME static Broken check_progress(Address address, Access kind) {
  constexpr unsigned reads_per_turn = 100000, turns = 10;
  Thread& thread = *runtime.current;
  if (kind == Access::write || address != thread.spin_address) {
    thread.spin_address = kind == Access::write ? 0 : address;
    thread.spin_count = 0;
    return nullptr;
  }
  if (++thread.spin_count % reads_per_turn) return nullptr;
  if (thread.spin_count >= reads_per_turn * turns) {
    return broken("waits for ever: it read the same address " + std::to_string(thread.spin_count) +
                  " times, and no other thread of its block changes it (thread blocks run one "
                  "after another here, so a block cannot wait for one with a higher number)");
  }
  thread.state = ThreadState::ready;
  switch_fiber(*thread.fiber, runtime.host);
  return nullptr;
}

// ---- One access -----------------------------------------------------------------------------

__attribute__((always_inline)) CUDA_ON_CPU_RUNTIME static inline void count_bytes(size_t bytes,
                                                                                  Access kind) {
  Statistics& statistics = runtime.statistics;
  const auto n = static_cast<std::int64_t>(bytes);
  if (kind != Access::read) statistics.bytes_written += n;
  if (kind == Access::write) return;
  statistics.bytes_read += n;
  std::int64_t& of_thread = runtime.current->bytes_read;
  of_thread += n;
  if (of_thread > statistics.most_read_by_a_thread) statistics.most_read_by_a_thread = of_thread;
}

CUDA_ON_CPU_RUNTIME static Broken check_access(Address address, size_t bytes, Access kind,
                                                    void* code_address) {
  Location location = locate(address, bytes);
  if (--full_checks_left == 0) suspicion.pending = false;  // what comes next will not excuse it
  if (location.kind == Location::nowhere) return broken(out_of_bounds(address, bytes, kind));
  if (location.kind == Location::tensor) count_bytes(bytes, kind);
  if (is_atomic(kind) && location.kind != Location::shared) {
    block_used_atomics = true;
    block_of_flag = runtime.block + 1;
  }
  if (is_atomic(kind)) take_back_read(address, bytes);
  settle_suspicion();
  latest_read = {address, kind == Access::read ? bytes : 0, index_of(runtime.current)};
  Mark now = mark_of_current_thread();
  for (size_t i = 0; i < bytes; ++i) {
    bool excusable = false;
    Broken rule = check_byte(address + i, kind, location, now, excusable);
    if (!rule) continue;
    if (!excusable || bytes > sizeof suspicion.before) return rule;
    if (!suspicion.pending) suspect(rule, kind, address, bytes, code_address);
  }
  if (needs_a_value(kind) && location.kind == Location::tensor) {
    if (Broken rule = check_written(address, bytes, *location.range)) return rule;
  }
  return check_progress(address, kind);
}

// Is it a local variable, or has this instruction been let pass in the same memory before? While
// all rules hold, that is memory of the thread's own.
__attribute__((always_inline)) CUDA_ON_CPU_RUNTIME static inline bool passes_at_once(
    Address address, size_t bytes, Access kind, void* code_address) {
  if (address - runtime.current_stack < kStackBytes) return true;
  const PassedRange& range = passed_ranges[Address(code_address) % 256];
  size_t offset = address - range.begin;
  if (range.code_address != code_address || offset >= range.bytes || offset + bytes > range.bytes)
    return false;
  if (range.kind == PassedRange::own_memory) return true;
  Thread& thread = *runtime.current;
  if (kind != Access::write && address == thread.spin_address) return false;  // for rule 4
  thread.spin_address = kind == Access::write ? 0 : address;
  thread.spin_count = 0;
  if (range.kind == PassedRange::tensor) count_bytes(bytes, kind);
  return true;
}

// The rules that need no history.
CUDA_ON_CPU_RUNTIME static Broken check_bounds(Address address, size_t bytes, Access kind,
                                                    void* code_address) {
  Location location = locate(address, bytes);
  if (location.kind == Location::nowhere) return broken(out_of_bounds(address, bytes, kind));
  const TensorRange* range = location.range;
  if (range) count_bytes(bytes, kind);
  if (range && range->made_empty && needs_a_value(kind)) {
    if (Broken rule = check_written(address, bytes, *range)) return rule;
  } else if (range) {
    let_pass(code_address, range->begin, range->end - range->begin, PassedRange::tensor);
  } else if (const SharedVariable* variable = location.variable) {
    let_pass(code_address, variable->begin, variable->end - variable->begin, PassedRange::shared);
  }
  return check_progress(address, kind);
}

__attribute__((noinline)) CUDA_ON_CPU_RUNTIME static void check(Address address, size_t bytes,
                                                                Access kind, void* code_address) {
  if (!in_kernel || was_handed_over(address, code_address)) return;
  InsideRuntime inside;  // the functions above call the standard library, which is watched too
  runtime.last_access = code_address;
  if (stop_signal) fail_in_kernel(stop_message(), {}, code_address);
  auto rules = full_checks_left ? check_access : check_bounds;
  if (Broken rule = rules(address, bytes, kind, code_address))
    fail_in_kernel(*rule, {}, code_address);
}

CUDA_ON_CPU_RUNTIME static void access(const void* pointer, size_t bytes, Access kind,
                                       void* code_address) {
  if (!passes_at_once(Address(pointer), bytes, kind, code_address))
    check(Address(pointer), bytes, kind, code_address);
}

#endif

}  // namespace cuda_on_cpu
