// A fiber is a stack and the place where its function stopped. switch_fiber stops one and goes on
// with another; no operating system thread is involved, so it takes nanoseconds.
#pragma once
namespace cuda_on_cpu {

CUDA_ON_CPU_RUNTIME static void fiber_main();               // launch.h
CUDA_ON_CPU_RUNTIME static inline void settle_suspicion();  // checker.h

#if defined(__x86_64__) && !defined(CUDA_ON_CPU_UCONTEXT)

// Push the registers that a function must preserve, change stacks, pop the other fiber's.
extern "C" __attribute__((visibility("hidden"))) void cuda_on_cpu_switch(void** save, void* load);
asm(".text\n"
    ".type cuda_on_cpu_switch,@function\n"
    "cuda_on_cpu_switch:\n"
    "  pushq %rbp\n"
    "  pushq %rbx\n"
    "  pushq %r12\n"
    "  pushq %r13\n"
    "  pushq %r14\n"
    "  pushq %r15\n"
    "  movq %rsp, (%rdi)\n"
    "  movq %rsi, %rsp\n"
    "  popq %r15\n"
    "  popq %r14\n"
    "  popq %r13\n"
    "  popq %r12\n"
    "  popq %rbx\n"
    "  popq %rbp\n"
    "  ret\n"
    ".size cuda_on_cpu_switch,.-cuda_on_cpu_switch\n");

CUDA_ON_CPU_RUNTIME static void switch_fiber(Fiber& from, Fiber& to) {
  cuda_on_cpu_switch(&from.stack_pointer, to.stack_pointer);
}

CUDA_ON_CPU_RUNTIME static void point_at_start(Fiber& fiber) {
  // A stack as cuda_on_cpu_switch leaves it: six registers, then the address that `ret` jumps to.
  // The empty slot above it keeps the alignment that a function expects after a call.
  void** top = reinterpret_cast<void**>(fiber.stack + kStackBytes);
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(fiber_main);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  fiber.stack_pointer = top;
}

#else  // any processor, about twenty times slower: each switch is a system call

CUDA_ON_CPU_RUNTIME static void switch_fiber(Fiber& from, Fiber& to) {
  swapcontext(&from.context, &to.context);
}

CUDA_ON_CPU_RUNTIME static void point_at_start(Fiber& fiber) {
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack;
  fiber.context.uc_stack.ss_size = kStackBytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, fiber_main, 0);
}

#endif

CUDA_ON_CPU_RUNTIME static Fiber* take_idle_fiber() {
  if (runtime.idle_fibers.empty()) {
    // A page that nobody may touch lies below the stack: overflowing it never hits a neighbour.
    size_t guard = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    void* memory = mmap(nullptr, guard + kStackBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(memory != MAP_FAILED, "cuda_on_cpu: no memory for the stack of a thread");
    mprotect(memory, guard, PROT_NONE);
    Fiber* fiber = new Fiber;  // kept for the next launch, until the process ends
    fiber->stack = static_cast<char*>(memory) + guard;
    point_at_start(*fiber);
    runtime.all_fibers.push_back(fiber);
    runtime.idle_fibers.push_back(fiber);
  }
  Fiber* fiber = runtime.idle_fibers.back();
  runtime.idle_fibers.pop_back();
  return fiber;
}

// After an error the fibers have stopped anywhere; they all start again.
CUDA_ON_CPU_RUNTIME static void restart_all_fibers() {
  runtime.idle_fibers = runtime.all_fibers;
  for (Fiber* fiber : runtime.all_fibers) point_at_start(*fiber);
}

// The current thread stops; the scheduler (launch.h) comes back to it when its state allows.
CUDA_ON_CPU_RUNTIME static void wait_for_next_turn() {
  in_kernel = false;
  settle_suspicion();
  switch_fiber(*runtime.current->fiber, runtime.host);
  in_kernel = true;
}

}  // namespace cuda_on_cpu
