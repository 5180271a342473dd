// How a kernel ends with a message. On a GPU it would be "an illegal memory access was
// encountered", or a wrong number; here the message names the kernel, the thread and the line.
#pragma once

#ifndef CUDA_ON_CPU_ADDR2LINE
#define CUDA_ON_CPU_ADDR2LINE "addr2line"
#endif

static inline const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    default: return "unknown error";
  }
}

namespace cuda_on_cpu {

// The first error is the one to report.
CUDA_ON_CPU_RUNTIME static void record_failure(std::string message, Place place,
                                               void* code_address = nullptr) {
  if (runtime.failure.found) return;
  runtime.failure = {true, std::move(message), place, code_address};
}

// Called by a thread, with in_kernel off: records the error and never returns. The fiber is left as
// it is, so that nothing has to unwind through the kernel.
CUDA_ON_CPU_RUNTIME static void fail_in_kernel(std::string message, Place place,
                                               void* code_address = nullptr) {
  in_kernel = false;
  record_failure(message + ", " + name_of_thread(runtime.current), place, code_address);
  switch_fiber(*runtime.current->fiber, runtime.host);
}

// The line of the .cu that a machine instruction was made from. Functions inlined into the kernel
// give one line each, innermost first: the first one that lies in the .cu itself is meant.
CUDA_ON_CPU_RUNTIME static std::string line_of(void* code_address, const char* source_file) {
  Dl_info library;
  if (!dladdr(code_address, &library)) return "";
  size_t offset = Address(code_address) - 1 - Address(library.dli_fbase);
  char command[4096];
  snprintf(command, sizeof command, "'%s' -i -s -e '%s' 0x%zx 2>/dev/null", CUDA_ON_CPU_ADDR2LINE,
           library.dli_fname, offset);
  FILE* output = popen(command, "r");
  if (!output) return "";
  std::string prefix = std::string(source_file) + ":", found;
  char line[1024];
  while (fgets(line, sizeof line, output)) {
    std::string text(line);
    if (found.empty() && text.rfind(prefix, 0) == 0)
      found = text.substr(0, text.find_first_of(" \n"));
  }
  pclose(output);
  return found;
}

// The type that PyTorch raises for errors of the GPU: torch.AcceleratorError, a RuntimeError.
[[noreturn]] CUDA_ON_CPU_RUNTIME static void raise(const std::string& message, int code) {
  throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, code, message);
}

[[noreturn]] CUDA_ON_CPU_RUNTIME static void raise_failure() {
  Failure& failure = runtime.failure;
  std::string where;
  if (failure.code_address) {
    where = line_of(failure.code_address, runtime.launch_place.file);
    // In an atomic operation or another function of ours: where the kernel called it.
    if (where.empty() && runtime.last_access)
      where = line_of(runtime.last_access, runtime.launch_place.file);
  } else if (failure.place.file) {
    where = std::string(failure.place.file) + ":" + std::to_string(failure.place.line);
  }
  raise("CUDA kernel " + std::string(runtime.kernel) + ": " + failure.message +
            (where.empty() ? "" : "\n  at " + where),
        cudaErrorLaunchFailure);
}

// What a launch or a call that failed raises, once somebody asks: C10_CUDA_KERNEL_LAUNCH_CHECK().
static inline void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::string detail = std::move(runtime.last_error_detail);
  runtime.last_error_detail.clear();
  raise("CUDA error: " + std::string(cudaGetErrorString(error)) +
            (detail.empty() ? "" : ": " + detail),
        error);
}

}  // namespace cuda_on_cpu

// assert() in a kernel ends the kernel, not the process. The C library's assert calls this
// function, and so does CUDA_KERNEL_ASSERT.
extern "C" __attribute__((noreturn)) CUDA_ON_CPU_RUNTIME void __assert_fail(
    const char* condition, const char* file, unsigned line, const char* function) noexcept {
  if (cuda_on_cpu::in_kernel) {
    cuda_on_cpu::in_kernel = false;
    const char* slash = strrchr(file, '/');
    cuda_on_cpu::fail_in_kernel("assertion `" + std::string(condition) + "` failed",
                                {slash ? slash + 1 : file, static_cast<int>(line)});
  }
  fprintf(stderr, "%s:%u: %s: Assertion `%s' failed.\n", file, line, function, condition);
  abort();
}
CUDA_ON_CPU_RUNTIME static inline void __trap(CUDA_ON_CPU_HERE) {
  cuda_on_cpu::in_kernel = false;
  cuda_on_cpu::fail_in_kernel("__trap()", place);
}
