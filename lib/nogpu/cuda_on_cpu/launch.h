// kernel<<<grid, block, bytes, stream>>>(a, b) becomes
// ::cuda_on_cpu::Launch(grid, block, bytes, stream).kernel("kernel", "x,y", [&](auto... a) {
// kernel(a...); })(a, b), with the names of its parameters, and the kernel has ended when the call
// returns. Streams make no difference.
#pragma once
namespace cuda_on_cpu {

CUDA_ON_CPU_RUNTIME static void give_turn_to(Thread* thread) {
  runtime.current = thread;
  runtime.current_stack = Address(thread->fiber->stack);
  builtin.thread_index = coordinates(index_of(thread));
}

// What runs on every fiber. Threads that never wait are run one after another on the same fiber,
// so that a pointwise kernel is a plain loop.
CUDA_ON_CPU_RUNTIME static void fiber_main() {
  for (;;) {
    for (;;) {
      in_kernel = true;
      runtime.body(runtime.arguments);
      in_kernel = false;
      settle_suspicion();
      runtime.current->state = ThreadState::done;
      --runtime.live_threads;
      if (runtime.turn + 1 >= runtime.n_threads || stop_signal) break;
      Thread* next = &runtime.threads[runtime.order[runtime.turn + 1]];
      if (next->state != ThreadState::fresh) break;
      ++runtime.turn;
      next->fiber = runtime.current->fiber;
      give_turn_to(next);
    }
    Fiber* fiber = runtime.current->fiber;
    runtime.idle_fibers.push_back(fiber);
    switch_fiber(*fiber, runtime.host);
  }
}

CUDA_ON_CPU_RUNTIME static void start_block(std::uint32_t block) {
  if (runtime.arena_used) {  // by the block before
    std::memset(runtime.arena, 0xff, runtime.arena_used);
    forget_passed_ranges();
  }
  runtime.block = block;
  builtin.block_index = block_coordinates(block);
  ++runtime.block_epoch;
  runtime.barriers_passed = 0;
  runtime.live_threads = runtime.n_threads;
  runtime.arena_used = 0;
  runtime.shared_bytes = 0;
  runtime.shared_variables.clear();
  for (unsigned k = 0; k < runtime.n_threads; ++k) {
    Thread& thread = runtime.threads[k];
    thread.state = ThreadState::fresh;
    thread.spin_address = 0;
    thread.spin_count = 0;
    thread.bytes_read = 0;
  }
}

// Gives every thread that can run one turn. False: none could.
CUDA_ON_CPU_RUNTIME static bool run_ready_threads() {
  bool progress = false;
  for (runtime.turn = 0; runtime.turn < runtime.n_threads; ++runtime.turn) {
    if (stop_signal) record_failure(stop_message(), {}, runtime.last_access);
    if (runtime.failure.found) return true;
    Thread* thread = &runtime.threads[runtime.order[runtime.turn]];
    if (thread->state == ThreadState::fresh) {
      thread->fiber = take_idle_fiber();
    } else if (thread->state != ThreadState::ready) {
      continue;
    }
    give_turn_to(thread);
    switch_fiber(runtime.host, *thread->fiber);
    progress = true;
  }
  return progress;
}

// All threads wait. Warp intrinsics whose other lanes have exited since are completed.
CUDA_ON_CPU_RUNTIME static bool complete_warp_calls() {
  bool completed = false;
  for (unsigned k = 0; k < runtime.n_threads; ++k) {
    Thread& thread = runtime.threads[k];
    if (thread.state == ThreadState::in_warp && complete_warp_call(&thread)) completed = true;
  }
  for (unsigned k = 0; k < runtime.n_threads && !completed; ++k) {
    Thread& thread = runtime.threads[k];
    if (thread.state != ThreadState::in_warp || thread.call != WarpCall::coalesce) continue;
    coalesce(&thread);
    completed = true;
  }
  return completed;
}

// All threads wait, and some in a warp intrinsic: it will never be complete.
CUDA_ON_CPU_RUNTIME static bool warp_is_stuck() {
  const Thread *in_warp = nullptr, *at_barrier = nullptr;
  for (unsigned k = 0; k < runtime.n_threads; ++k) {
    const Thread& thread = runtime.threads[k];
    if (thread.state == ThreadState::in_warp) in_warp = &thread;
    if (thread.state == ThreadState::at_barrier) at_barrier = &thread;
  }
  if (!in_warp) return false;
  record_failure("deadlock: a warp intrinsic with mask " + hexadecimal(in_warp->mask) +
                     " waits for lanes that never come" +
                     (at_barrier ? "; others wait at __syncthreads() in line " +
                                       std::to_string(at_barrier->place.line)
                                 : "") +
                     ", " + name_of_thread(in_warp),
                 in_warp->place);
  return true;
}

// All threads that have not exited wait at __syncthreads(): they go on, if it is the same one.
CUDA_ON_CPU_RUNTIME static void open_barrier() {
  const Thread* first = nullptr;
  runtime.barrier_votes = 0;
  for (unsigned k = 0; k < runtime.n_threads; ++k) {
    const Thread& thread = runtime.threads[k];
    if (thread.state != ThreadState::at_barrier) continue;
    if (!first) first = &thread;
    if (thread.place.line != first->place.line) {
      record_failure("__syncthreads() in divergent code: " + name_of_thread(first) +
                         " waits in line " + std::to_string(first->place.line) + ", " +
                         name_of_thread(&thread) + " in line " + std::to_string(thread.place.line),
                     first->place);
      return;
    }
    runtime.barrier_votes += static_cast<int>(thread.value_in);
  }
#ifdef CUDA_ON_CPU_CHECKED
  if (runtime.live_threads < runtime.n_threads) {
    record_failure(
        "__syncthreads() that " + std::to_string(runtime.n_threads - runtime.live_threads) +
            " of " + std::to_string(runtime.n_threads) +
            " threads of the block never reach, as they have returned: all have to reach "
            "it, so guard the loads and stores around it, " +
            name_of_thread(first),
        first->place);
    return;
  }
#endif
  ++runtime.barriers_passed;
  for (unsigned k = 0; k < runtime.n_threads; ++k) {
    ThreadState& state = runtime.threads[k].state;
    if (state == ThreadState::at_barrier) state = ThreadState::ready;
  }
}

CUDA_ON_CPU_RUNTIME static void run_block(std::uint32_t block) {
  start_block(block);
  while (runtime.live_threads && !runtime.failure.found) {
    if (run_ready_threads()) continue;
    if (complete_warp_calls() || runtime.failure.found) continue;
    if (!warp_is_stuck()) open_barrier();
  }
}

// In which order the threads of a block get their turns: CUDA_ON_CPU_ORDER is `forward`, `reverse`
// or a number, the seed of a random order. A correct kernel gives the same answer in each.
CUDA_ON_CPU_RUNTIME static void set_thread_order() {
  unsigned* order = runtime.order;
  for (unsigned i = 0; i < runtime.n_threads; ++i) order[i] = i;
  const char* wish = getenv("CUDA_ON_CPU_ORDER");
  if (!wish) return;
  if (!strcmp(wish, "reverse")) std::reverse(order, order + runtime.n_threads);
  std::uint64_t random = strtoull(wish, nullptr, 10);
  if (!random) return;
  for (unsigned i = runtime.n_threads - 1; i > 0; --i) {
    random = random * 6364136223846793005u + 1442695040888963407u;
    std::swap(order[i], order[(random >> 33) % (i + 1)]);
  }
}

// What a GPU refuses to launch; the empty string where it would not.
CUDA_ON_CPU_RUNTIME static std::string launch_error(dim3 grid, dim3 block, size_t shared_bytes) {
  auto triple = [](dim3 d) {
    return "(" + std::to_string(d.x) + "," + std::to_string(d.y) + "," + std::to_string(d.z) + ")";
  };
  std::uint64_t threads = std::uint64_t(block.x) * block.y * block.z;
  if (threads == 0 || threads > kMaxThreads || block.z > 64) {
    return "thread blocks of " + triple(block) + " = " + std::to_string(threads) +
           " threads; a block has 1 to 1024";
  }
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) {
    return "a grid of " + triple(grid) + " thread blocks; an empty tensor needs no launch";
  }
  if (grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535) {
    return "a grid of " + triple(grid) + " thread blocks; the limits are (2147483647,65535,65535)";
  }
  if (shared_bytes > runtime.shared_limit) {
    return std::to_string(shared_bytes) + " bytes of dynamic shared memory; the limit is " +
           std::to_string(runtime.shared_limit) +
           (runtime.shared_limit == kSharedMemoryBytes
                ? ", more needs cudaFuncSetAttribute(kernel, "
                  "cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)"
                : "");
  }
  return "";
}

CUDA_ON_CPU_RUNTIME static void run_grid(dim3 grid, dim3 block) {
  if (!runtime.arena) {
    runtime.arena = static_cast<char*>(aligned_alloc(256, kArenaBytes));
    std::memset(runtime.arena, 0xff, kArenaBytes);
  }
  char local;
  runtime.host_stack = Address(&local);
  runtime.failure = {};
  runtime.last_access = nullptr;
  builtin.grid_size = grid;
  builtin.block_size = block;
  runtime.n_threads = block.x * block.y * block.z;
  set_thread_order();
  start_checking();
  std::uint64_t blocks = std::uint64_t(grid.x) * grid.y * grid.z;
  runtime.statistics.launches += 1;
  runtime.statistics.thread_blocks += static_cast<std::int64_t>(blocks);
  runtime.statistics.threads += static_cast<std::int64_t>(blocks * runtime.n_threads);
  {
    Interruptible while_it_runs;
    for (std::uint64_t number = 0; number < blocks && !runtime.failure.found; ++number) {
      run_block(static_cast<std::uint32_t>(number));
    }
    if (stop_signal) record_failure(stop_message(), {}, runtime.last_access);
  }
  if (runtime.failure.found) {
    restart_all_fibers();
    raise_failure();
  }
}

template <class Function>
struct KernelCall {
  const char* name;
  const char* parameters;
  Function call_kernel;
  dim3 grid, block;
  size_t shared_bytes;
  Place place;

  template <class... Arguments>
  void operator()(Arguments&&... arguments) {
    if (in_kernel) {
      in_kernel = false;
      fail_in_kernel("a kernel that launches a kernel", place);
    }
    std::lock_guard<std::mutex> lock(runtime.mutex);
    runtime.kernel = name;
    runtime.launch_place = place;
    if (std::string error = launch_error(grid, block, shared_bytes); !error.empty()) {
      runtime.last_error = cudaErrorInvalidConfiguration;
      runtime.last_error_detail = std::string(name) + " was launched with " + error + "\n  at " +
                                  place.file + ":" + std::to_string(place.line);
#if defined(CUDA_ON_CPU_CHECKED) && !defined(CUDA_ON_CPU_CHECKED_FIRST)
      check(std::exchange(runtime.last_error, cudaSuccess));
#endif
      return;  // as on a GPU, nothing happens until somebody asks cudaGetLastError()
    }
    open_tensors<std::decay_t<Arguments>...>(parameters, arguments...);
    using Values = std::tuple<std::decay_t<Arguments>...>;
    std::pair<Function, Values> call(call_kernel, Values(std::forward<Arguments>(arguments)...));
    runtime.arguments = &call;
    runtime.arguments_bytes = sizeof call;
    runtime.body = [](void* pointer) {
      auto& [function, values] = *static_cast<decltype(call)*>(pointer);
      std::apply(function, values);
    };
    runtime.dynamic_shared_bytes = shared_bytes;
    run_grid(grid, block);
  }
};

struct Launch {
  dim3 grid, block;
  size_t shared_bytes;
  Place place;

  Launch(dim3 grid, dim3 block, size_t shared_bytes = 0, cudaStream_t = nullptr, CUDA_ON_CPU_HERE)
      : grid(grid), block(block), shared_bytes(shared_bytes), place(place) {}

  template <class Function>
  KernelCall<Function> kernel(const char* name, const char* parameters, Function function) {
    return {name, parameters, function, grid, block, shared_bytes, place};
  }
};

}  // namespace cuda_on_cpu
