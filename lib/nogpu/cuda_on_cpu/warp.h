// Barriers and warp intrinsics: where one thread waits for others, and so where fibers switch.
//
// A warp intrinsic is complete when every live lane of its mask waits in the same intrinsic with
// the same mask. Lanes that have exited do not count, as on a GPU. What a lane reads from one that
// takes no part is undefined there; here it is all one bits, NaN for floating-point types.
#pragma once
namespace cuda_on_cpu {

CUDA_ON_CPU_RUNTIME static unsigned first_of_warp(const Thread* thread) {
  return index_of(thread) / kWarpSize * kWarpSize;
}

CUDA_ON_CPU_RUNTIME static std::string hexadecimal(unsigned value) {
  char text[16];
  snprintf(text, sizeof text, "0x%08x", value);
  return text;
}

// Which lanes of the warp have come to the intrinsic where `thread` waits? Zero: not all of them
// yet.
CUDA_ON_CPU_RUNTIME static unsigned gathered_lanes(const Thread* thread) {
  unsigned first = first_of_warp(thread), lanes = 0;
  for (unsigned lane = 0; lane < kWarpSize && first + lane < runtime.n_threads; ++lane) {
    if (!(thread->mask >> lane & 1)) continue;
    const Thread& other = runtime.threads[first + lane];
    if (other.state == ThreadState::done) continue;
    if (other.state != ThreadState::in_warp) return 0;
    if (other.call != thread->call || other.mask != thread->mask) {
      bool waits_for_us = other.mask >> (index_of(thread) - first) & 1;
      if (!waits_for_us) return 0;  // it is on its way
      record_failure(
          "lanes of a warp wait in different warp intrinsics, or with different masks (lines " +
              std::to_string(thread->place.line) + " and " + std::to_string(other.place.line) + ")",
          thread->place);
      return 0;
    }
    lanes |= 1u << lane;
  }
  return lanes;
}

// The lane whose value a shuffle hands to `lane`.
CUDA_ON_CPU_RUNTIME static int source_lane(const Thread& thread, int lane) {
  int width = thread.width, first = lane & ~(width - 1);
  int source = lane;
  switch (thread.call) {
    case WarpCall::shuffle: return first + (thread.argument & (width - 1));
    case WarpCall::shuffle_up:
      source = lane - thread.argument;
      return source < first ? lane : source;
    case WarpCall::shuffle_down:
      source = lane + thread.argument;
      return source >= first + width ? lane : source;
    case WarpCall::shuffle_xor:
      source = lane ^ thread.argument;
      return source >= first + width ? lane : source;
    default: return lane;
  }
}

#ifdef CUDA_ON_CPU_CHECKED
// __syncwarp() orders memory: what one of its lanes has seen of the others, all of them have seen
// now.
CUDA_ON_CPU_RUNTIME static void join_lanes(unsigned first, unsigned lanes) {
  std::uint32_t seen[kWarpSize] = {};
  ++runtime.warp_syncs;
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    if (!(lanes >> lane & 1)) continue;
    const Thread& member = runtime.threads[first + lane];
    for (unsigned k = 0; k < kWarpSize; ++k) seen[k] = std::max(seen[k], member.seen[k]);
  }
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    if (lanes >> lane & 1) seen[lane] = runtime.warp_syncs;
  }
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    if (lanes >> lane & 1) std::copy_n(seen, kWarpSize, runtime.threads[first + lane].seen);
  }
}
#endif

// The lanes that wait in the same line for the lanes that are there go on together.
CUDA_ON_CPU_RUNTIME static void coalesce(const Thread* thread) {
  unsigned first = first_of_warp(thread), lanes = 0;
  auto waits_here = [&](const Thread& other) {
    return other.state == ThreadState::in_warp && other.call == WarpCall::coalesce &&
           other.place.line == thread->place.line;
  };
  unsigned last = std::min(first + kWarpSize, runtime.n_threads);
  for (unsigned k = first; k < last; ++k) {
    if (waits_here(runtime.threads[k])) lanes |= 1u << (k - first);
  }
  for (unsigned k = first; k < last; ++k) {
    if (!(lanes >> (k - first) & 1)) continue;
    runtime.threads[k].value_out = lanes;
    runtime.threads[k].state = ThreadState::ready;
  }
}

// If every lane has come, gives each its result and lets them go on.
CUDA_ON_CPU_RUNTIME static bool complete_warp_call(const Thread* thread) {
  if (thread->call == WarpCall::coalesce) return false;  // others may come yet
  unsigned lanes = gathered_lanes(thread);
  if (!lanes) return false;
  unsigned first = first_of_warp(thread), ballot = 0;
  for (unsigned lane = 0; lane < kWarpSize && first + lane < runtime.n_threads; ++lane) {
    if (lanes >> lane & runtime.threads[first + lane].value_in & 1) ballot |= 1u << lane;
  }
#ifdef CUDA_ON_CPU_CHECKED
  if (thread->call == WarpCall::sync) join_lanes(first, lanes);
#endif
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    if (!(lanes >> lane & 1)) continue;
    Thread& member = runtime.threads[first + lane];
    int source = source_lane(member, static_cast<int>(lane));
    if (member.call == WarpCall::ballot) {
      member.value_out = ballot;
    } else if (lanes >> source & 1) {
      member.value_out = runtime.threads[first + source].value_in;
    } else {
      member.value_out = ~std::uint64_t(0);
#ifdef CUDA_ON_CPU_CHECKED
      if (member.mask >> source & 1) {
        record_failure(
            "a shuffle reads lane " + std::to_string(source) + " of its warp, which " +
                (first + source < runtime.n_threads ? "has returned" : "does not exist") +
                ": the value is undefined; every lane of the mask has to take part, so "
                "guard the load and the store, not the thread, " +
                name_of_thread(&member),
            member.place);
        return false;
      }
#endif
    }
  }
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    if (lanes >> lane & 1) runtime.threads[first + lane].state = ThreadState::ready;
  }
  return true;
}

CUDA_ON_CPU_RUNTIME static std::uint64_t warp_call(WarpCall call, unsigned mask,
                                                   std::uint64_t value, int argument, int width,
                                                   Place place) {
  Thread* thread = runtime.current;
  in_kernel = false;
  if (!(mask >> (index_of(thread) % kWarpSize) & 1)) {
    fail_in_kernel("the mask " + hexadecimal(mask) + " of a warp intrinsic lacks the calling lane",
                   place);
  }
  thread->call = call;
  thread->mask = mask;
  thread->value_in = value;
  thread->argument = argument;
  thread->width = width;
  thread->place = place;
  thread->state = ThreadState::in_warp;
  if (!complete_warp_call(thread)) wait_for_next_turn();  // the last lane to come need not wait
  in_kernel = true;
  return thread->value_out;
}

template <class T>
CUDA_ON_CPU_RUNTIME static T shuffle(WarpCall call, unsigned mask, T value, int argument, int width,
                                     Place place) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable<T>::value,
                "a shuffle moves at most 8 bytes");
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = warp_call(call, mask, bits, argument, width, place);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Returns in how many threads of the block `vote` is true.
CUDA_ON_CPU_RUNTIME static int block_barrier(bool vote, Place place) {
  Thread* thread = runtime.current;
  thread->state = ThreadState::at_barrier;
  thread->place = place;
  thread->value_in = vote;
  wait_for_next_turn();
  return runtime.barrier_votes;
}

}  // namespace cuda_on_cpu

CUDA_ON_CPU_RUNTIME static inline void __syncthreads(CUDA_ON_CPU_HERE) {
  cuda_on_cpu::block_barrier(false, place);
}
CUDA_ON_CPU_RUNTIME static inline int __syncthreads_count(int vote, CUDA_ON_CPU_HERE) {
  return cuda_on_cpu::block_barrier(vote != 0, place);
}
CUDA_ON_CPU_RUNTIME static inline int __syncthreads_or(int vote, CUDA_ON_CPU_HERE) {
  return cuda_on_cpu::block_barrier(vote != 0, place) != 0;
}
CUDA_ON_CPU_RUNTIME static inline int __syncthreads_and(int vote, CUDA_ON_CPU_HERE) {
  return cuda_on_cpu::block_barrier(vote == 0, place) == 0;
}
CUDA_ON_CPU_RUNTIME static inline void __syncwarp(unsigned mask = ~0u, CUDA_ON_CPU_HERE) {
  cuda_on_cpu::warp_call(cuda_on_cpu::WarpCall::sync, mask, 0, 0, 32, place);
}

template <class T>
static inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32, CUDA_ON_CPU_HERE) {
  return cuda_on_cpu::shuffle(cuda_on_cpu::WarpCall::shuffle, mask, value, lane, width, place);
}
template <class T>
static inline T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32,
                               CUDA_ON_CPU_HERE) {
  return cuda_on_cpu::shuffle(cuda_on_cpu::WarpCall::shuffle_up, mask, value, static_cast<int>(by),
                              width, place);
}
template <class T>
static inline T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32,
                                 CUDA_ON_CPU_HERE) {
  return cuda_on_cpu::shuffle(cuda_on_cpu::WarpCall::shuffle_down, mask, value,
                              static_cast<int>(by), width, place);
}
template <class T>
static inline T __shfl_xor_sync(unsigned mask, T value, int with, int width = 32,
                                CUDA_ON_CPU_HERE) {
  return cuda_on_cpu::shuffle(cuda_on_cpu::WarpCall::shuffle_xor, mask, value, with, width, place);
}

static inline unsigned __ballot_sync(unsigned mask, int vote, CUDA_ON_CPU_HERE) {
  return static_cast<unsigned>(
      cuda_on_cpu::warp_call(cuda_on_cpu::WarpCall::ballot, mask, vote != 0, 0, 32, place));
}
static inline int __any_sync(unsigned mask, int vote, CUDA_ON_CPU_HERE) {
  return __ballot_sync(mask, vote, place) != 0;
}
static inline int __all_sync(unsigned mask, int vote, CUDA_ON_CPU_HERE) {
  return __ballot_sync(mask, !vote, place) == 0;
}
// On a GPU: the lanes that happen to run together. Here: those that have not exited.
CUDA_ON_CPU_RUNTIME static inline unsigned __activemask() {
  unsigned first = cuda_on_cpu::first_of_warp(cuda_on_cpu::runtime.current), mask = 0;
  for (unsigned lane = 0; lane < 32 && first + lane < cuda_on_cpu::runtime.n_threads; ++lane) {
    if (cuda_on_cpu::runtime.threads[first + lane].state != cuda_on_cpu::ThreadState::done) {
      mask |= 1u << lane;
    }
  }
  return mask;
}
