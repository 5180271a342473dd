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
#pragma once
namespace cuda_on_cpu {

enum class Access { read, write, atomic_update };

#ifndef CUDA_ON_CPU_CHECKED

static inline void start_checking() {}
static inline void settle_suspicion() {}
static inline void note_fence() {}
static inline void access(const void*, size_t, Access, void*) {}

#else

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
  std::string message;  // empty: there is none
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

static bool block_used_atomics = false;  // the thread block that runs now
static std::uint32_t block_of_flag = 0;
static std::unordered_set<std::uint32_t> blocks_with_fence;  // those that called __threadfence()

CUDA_ON_CPU_RUNTIME static void start_checking() {
  history_pages.clear();  // the launches of a stream are ordered: each starts afresh
  latest_page = ~Address(0);
  blocks_with_fence.clear();
  block_of_flag = 0;
  suspicion.message.clear();
  latest_read = {};
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
  enum Kind { own_memory, tensor, shared, device_variable, nowhere } kind = nowhere;
  const TensorRange* range = nullptr;
  const SharedVariable* variable = nullptr;
};

extern "C" __attribute__((visibility("hidden"))) char __ehdr_start, _end;  // the built library

CUDA_ON_CPU_RUNTIME static Location locate(Address address, size_t bytes) {
  Location location;
  constexpr size_t below_launch = 64 << 10, around_launch = 1 << 20;
  if (address - Address(runtime.current->fiber->stack) < kStackBytes ||
      address - (runtime.host_stack - below_launch) < around_launch ||
      address - Address(&builtin) < sizeof builtin) {
    location.kind = Location::own_memory;
    return location;
  }
  if (address - Address(runtime.arena) < kArenaBytes) {
    for (const SharedVariable& variable : runtime.shared_variables) {
      if (address >= variable.begin && address + bytes <= variable.end) {
        location.kind = Location::shared;
        location.variable = &variable;
      }
    }
    return location;
  }
  for (const TensorRange* range : runtime.visible_tensors) {
    if (address >= range->begin && address + bytes <= range->end) {
      location.kind = Location::tensor;
      location.range = range;
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
  for (const TensorRange* range : runtime.visible_tensors) {
    // Just behind the end of one is more likely than far before the start of another.
    auto distance = [&](const TensorRange& r) -> Address {
      if (address < r.begin) return r.begin - address;
      return address < r.end ? 0 : address - r.end + 1;
    };
    if (!nearest || distance(*range) < distance(*nearest)) nearest = range;
  }
  if (!nearest) return text + " (the kernel was given no tensor)";
  return text + " at element " + element_number(address, nearest->begin, nearest->element_bytes) +
         " of a tensor with " + std::to_string(nearest->elements) + " elements";
}

CUDA_ON_CPU_RUNTIME static std::string name_of(const Location& location, Address address) {
  if (location.kind == Location::shared) {
    const SharedVariable& variable = *location.variable;
    return "element " + element_number(address, variable.begin, variable.element_bytes) +
           " of shared memory `" + variable.name + "`";
  }
  if (location.kind == Location::tensor) {
    const TensorRange& range = *location.range;
    return "element " + element_number(address, range.begin, range.element_bytes) +
           " of a tensor with " + std::to_string(range.elements) + " elements";
  }
  return "a __device__ variable";
}

// ---- Rule 2 for tensors: what torch::empty made holds a pattern, a NaN, until it is written --

CUDA_ON_CPU_RUNTIME static std::string check_written(Address address, size_t bytes,
                                                     const TensorRange& range) {
  unsigned width = range.element_bytes;
  if (!range.made_empty || width < 2 || width > 16) return "";
  Address element = address - (address - range.begin) % width;
  for (; element + width <= address + bytes; element += width) {
    if (element < address) continue;  // a part of one
    if (std::memcmp(reinterpret_cast<void*>(element), never_written(width), width)) continue;
    return "read of element " + element_number(element, range.begin, width) + " of a tensor with " +
           std::to_string(range.elements) +
           " elements that nobody has written since it was allocated; torch::zeros writes zeros";
  }
  return "";
}

// ---- Rule 3: what looks like a race, and is none ---------------------------------------------

CUDA_ON_CPU_RUNTIME static inline void settle_suspicion() {
  if (suspicion.message.empty()) return;
  std::string message = std::move(suspicion.message);
  suspicion.message.clear();
  bool same_value =
      suspicion.kind == Access::write &&
      !std::memcmp(suspicion.before, reinterpret_cast<void*>(suspicion.address), suspicion.bytes);
  if (!same_value) fail_in_kernel(std::move(message), {}, suspicion.code_address);
}

CUDA_ON_CPU_RUNTIME static void suspect(std::string message, Access kind, Address address,
                                        size_t bytes, void* code_address) {
  suspicion = {std::move(message), kind, address, bytes, {}, code_address};
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
  if (suspicion.kind == Access::read && suspicion.address == address) suspicion.message.clear();
}

// ---- Rules 2 and 3: one byte ----------------------------------------------------------------

CUDA_ON_CPU_RUNTIME static std::string race(Access kind, const Location& location, Address address,
                                            const char* other_kind, const Mark& other) {
  std::string here = std::string(verb(kind)) + " of " + name_of(location, address);
  bool other_block = other.several & Mark::several_blocks || other.block != runtime.block + 1;
  if (other_block) {
    return "race between thread blocks: nothing orders this " + here + " after the " + other_kind +
           " by " + name_of(other);
  }
  return "race: no barrier separates this " + here + " from the " + other_kind + " by " +
         name_of(other);
}

// `excusable`: whether a race, where there is one, may turn out to be none.
CUDA_ON_CPU_RUNTIME static std::string check_byte(Address address, Access kind,
                                                  const Location& location, const Mark& now,
                                                  bool& excusable) {
  ByteHistory& history = history_of(address);
  bool shared = location.kind == Location::shared;
  auto of_this_block = [&](const Mark& mark) { return mark.block == now.block; };
  if (shared && !of_this_block(history.write) && !of_this_block(history.atomics)) {
    history = ByteHistory();  // shared memory begins anew with each thread block
    if (kind == Access::read) return "read of uninitialised " + name_of(location, address);
  }
  if (!ordered(history.write, now)) {
    std::string error = race(kind, location, address, "write", history.write);
    excusable =
        kind == Access::write && ordered(history.reads, now) && ordered(history.atomics, now);
    if (excusable) history.write = now;
    return error;
  }
  if (kind != Access::read && !ordered(history.reads, now)) {
    return race(kind, location, address, "read", history.reads);
  }
  bool atomics_of_other_blocks =
      history.atomics.several & Mark::several_blocks || !of_this_block(history.atomics);
  if (kind != Access::atomic_update && !ordered(history.atomics, now) && !atomics_of_other_blocks) {
    std::string error = race(kind, location, address, "atomic update", history.atomics);
    excusable = kind == Access::read;
    if (excusable) add(history.reads, now);
    return error;
  }
  if (kind == Access::write) {
    history.write = now;
    history.reads = history.atomics = Mark();
  } else {
    add(kind == Access::read ? history.reads : history.atomics, now);
  }
  return "";
}

// ---- Rule 4 ---------------------------------------------------------------------------------

// Reading one address over and over: let the others run, and after ten rounds give up.
CUDA_ON_CPU_RUNTIME static std::string check_progress(Address address, Access kind) {
  constexpr unsigned reads_per_turn = 100000, turns = 10;
  Thread& thread = *runtime.current;
  if (kind == Access::write || address != thread.spin_address) {
    thread.spin_address = kind == Access::write ? 0 : address;
    thread.spin_count = 0;
    return "";
  }
  if (++thread.spin_count % reads_per_turn) return "";
  if (thread.spin_count >= reads_per_turn * turns) {
    return "waits for ever: it read the same address " + std::to_string(thread.spin_count) +
           " times, and no other thread of its block changes it (thread blocks run one after "
           "another "
           "here, so a block cannot wait for one with a higher number)";
  }
  thread.state = ThreadState::ready;
  switch_fiber(*thread.fiber, runtime.host);
  return "";
}

// ---- One access -----------------------------------------------------------------------------

CUDA_ON_CPU_RUNTIME static std::string check_access(Address address, size_t bytes, Access kind,
                                                    void* code_address) {
  Location location = locate(address, bytes);
  if (location.kind == Location::own_memory) return "";
  if (location.kind == Location::nowhere) return out_of_bounds(address, bytes, kind);
  if (location.kind == Location::tensor) {
    if (kind != Access::write) runtime.statistics.bytes_read += static_cast<std::int64_t>(bytes);
    if (kind != Access::read) runtime.statistics.bytes_written += static_cast<std::int64_t>(bytes);
  }
  if (kind == Access::atomic_update && location.kind != Location::shared) {
    block_used_atomics = true;
    block_of_flag = runtime.block + 1;
  }
  if (kind == Access::atomic_update) take_back_read(address, bytes);
  settle_suspicion();
  latest_read = {address, kind == Access::read ? bytes : 0, index_of(runtime.current)};
  Mark now = mark_of_current_thread();
  for (size_t i = 0; i < bytes; ++i) {
    bool excusable = false;
    std::string error = check_byte(address + i, kind, location, now, excusable);
    if (error.empty()) continue;
    if (!excusable || bytes > sizeof suspicion.before) return error;
    if (suspicion.message.empty()) suspect(std::move(error), kind, address, bytes, code_address);
  }
  if (kind != Access::write && location.kind == Location::tensor) {
    if (std::string error = check_written(address, bytes, *location.range); !error.empty())
      return error;
  }
  return check_progress(address, kind);
}

CUDA_ON_CPU_RUNTIME static void access(const void* pointer, size_t bytes, Access kind,
                                       void* code_address) {
  if (!in_kernel) return;
  InsideRuntime inside;  // the functions above call the standard library, which is watched too
  runtime.last_access = code_address;
  if (stop_signal) fail_in_kernel(stop_message(), {}, code_address);
  std::string error = check_access(Address(pointer), bytes, kind, code_address);
  if (!error.empty()) fail_in_kernel(std::move(error), {}, code_address);
}

#endif

}  // namespace cuda_on_cpu
