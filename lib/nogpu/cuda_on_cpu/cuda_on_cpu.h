// Runs a CUDA C++ source on the CPU, for learning and for tests on machines without a GPU.
//
// Thread blocks run one after another. Inside a block every CUDA thread is a fiber: a function with
// its own stack that runs until it reaches __syncthreads() or a warp intrinsic, where the next one
// takes over. So only one thread runs at a time, in an order that is always the same.
//
//   types.h          __global__ and friends, float4, dim3, threadIdx, cudaError_t
//   state.h          what the runtime knows: threads, stacks, shared memory, the error found
//   fibers.h         how one thread stops and another goes on
//   errors.h         how a kernel is ended with a message
//   interrupts.h     Ctrl-C and the time limit reach a kernel that never ends
//   warp.h           __shfl_*_sync, __ballot_sync, __syncwarp, __syncthreads
//   shared_memory.h  __shared__ arrays, fixed and dynamic
//   tensors.h        where the tensors begin and end whose data_ptr() was taken
//   launch.h         kernel<<<grid, block, bytes, stream>>>(...)
//   groups.h         cooperative groups: thread blocks, tiles of a warp, coalesced threads
//   atomics.h        atomicAdd and friends, __threadfence
//   device_math.h    __expf, rsqrtf, __ldg, min, max
//   half.h           __half, __nv_bfloat16 and their pairs
//   memory.h         cudaMalloc, cudaMemcpy and friends
//   host_api.h       what host code asks of CUDA and of c10::cuda: streams, guards, errors
//   checker.h        checked mode: is this access in bounds, initialised, free of races?
//   hooks.h          checked mode: the compiler calls these before every load and store
//
// Where it differs from a GPU: no two threads run at once, warps are not in lockstep, nothing is
// fast, coalescing and bank conflicts cost nothing, and float arithmetic is the CPU's. Inline PTX,
// wmma, cp.async, TMA, clusters and CUB are not there; cuda_translate.py says so.
#pragma once

#define CUDA_ON_CPU 1  // a source can ask: `#ifdef CUDA_ON_CPU`

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>
#include <dlfcn.h>
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <torch/library.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cfloat>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

// Marks our own functions, so that checked mode watches the kernel and not its watchman.
#ifdef __clang__  // clang's no_sanitize("thread") would still turn atomics into calls
#define CUDA_ON_CPU_RUNTIME \
  __attribute__((no_sanitize("undefined"), disable_sanitizer_instrumentation))
#else
#define CUDA_ON_CPU_RUNTIME __attribute__((no_sanitize("thread"), no_sanitize("undefined")))
#endif

// Default arguments that are filled in where the caller stands: the line in the .cu.
#define CUDA_ON_CPU_HERE ::cuda_on_cpu::Place place = {__builtin_FILE(), __builtin_LINE()}

// clang-format off
#include "types.h"
#include "state.h"
#include "fibers.h"
#include "errors.h"
#include "interrupts.h"
#include "warp.h"
#include "shared_memory.h"
#include "tensors.h"
#include "checker.h"
#include "launch.h"
#include "atomics.h"
#include "device_math.h"
#include "half.h"
#include "memory.h"
#include "host_api.h"
#include "hooks.h"
// clang-format on
