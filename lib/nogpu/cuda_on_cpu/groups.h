// Cooperative groups, on the barriers and warp intrinsics of warp.h: what one of them reports, such
// as a lane that never comes, it reports for a group. A tile has at most 32 threads.
#pragma once
namespace cooperative_groups {

namespace details {
static inline unsigned rank_in_block() {
  return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
}
static inline unsigned threads_in_block() { return blockDim.x * blockDim.y * blockDim.z; }
static inline unsigned lane() { return rank_in_block() % 32; }
static inline unsigned lanes_below(unsigned lane) { return (1u << lane) - 1; }
}  // namespace details

// Any group: a thread block, or some lanes of a warp.
class thread_group {
 public:
  unsigned long long size() const {
    return mask_ ? __builtin_popcount(mask_) : details::threads_in_block();
  }
  unsigned long long num_threads() const { return size(); }
  unsigned long long thread_rank() const {
    return mask_ ? __builtin_popcount(mask_ & details::lanes_below(details::lane()))
                 : details::rank_in_block();
  }
  void sync(CUDA_ON_CPU_HERE) const { mask_ ? __syncwarp(mask_, place) : __syncthreads(place); }
  bool is_valid() const { return true; }
  unsigned cuda_on_cpu_mask() const { return mask_; }

 protected:
  explicit thread_group(unsigned mask) : mask_(mask) {}
  unsigned mask_;  // 0: the whole thread block

  friend thread_group tiled_partition(const thread_group&, unsigned);
};

class thread_block : public thread_group {
 public:
  static void sync(CUDA_ON_CPU_HERE) { __syncthreads(place); }
  static unsigned size() { return details::threads_in_block(); }
  static unsigned num_threads() { return size(); }
  static unsigned thread_rank() { return details::rank_in_block(); }
  static dim3 group_index() { return dim3(blockIdx); }
  static dim3 thread_index() { return dim3(threadIdx); }
  static dim3 group_dim() { return blockDim; }
  static dim3 dim_threads() { return blockDim; }

 private:
  thread_block() : thread_group(0) {}
  friend thread_block this_thread_block();
};
inline thread_block this_thread_block() { return {}; }

// Lanes of one warp. Ranks count them from 0.
class warp_group : public thread_group {
 public:
  unsigned size() const { return static_cast<unsigned>(thread_group::size()); }
  unsigned num_threads() const { return size(); }
  unsigned thread_rank() const { return static_cast<unsigned>(thread_group::thread_rank()); }
  unsigned meta_group_rank() const { return meta_rank_; }
  unsigned meta_group_size() const { return meta_size_; }

  template <class T>
  T shfl(T value, int rank, CUDA_ON_CPU_HERE) const {
    return from_rank(value, static_cast<unsigned>(rank) % size(), place);
  }
  template <class T>
  T shfl_down(T value, unsigned by, CUDA_ON_CPU_HERE) const {
    unsigned rank = thread_rank();
    return from_rank(value, rank + by < size() ? rank + by : rank, place);
  }
  template <class T>
  T shfl_up(T value, unsigned by, CUDA_ON_CPU_HERE) const {
    unsigned rank = thread_rank();
    return from_rank(value, rank >= by ? rank - by : rank, place);
  }
  template <class T>
  T shfl_xor(T value, unsigned with, CUDA_ON_CPU_HERE) const {
    unsigned rank = thread_rank();
    return from_rank(value, (rank ^ with) < size() ? rank ^ with : rank, place);
  }
  // Bit k is the vote of rank k.
  unsigned ballot(int vote, CUDA_ON_CPU_HERE) const {
    unsigned lanes = __ballot_sync(mask_, vote, place), ranks = 0, rank = 0;
    for (unsigned rest = mask_; rest; rest &= rest - 1, ++rank) {
      ranks |= (lanes >> __builtin_ctz(rest) & 1) << rank;
    }
    return ranks;
  }
  int any(int vote, CUDA_ON_CPU_HERE) const { return ballot(vote, place) != 0; }
  int all(int vote, CUDA_ON_CPU_HERE) const { return ballot(!vote, place) == 0; }
  template <class T>
  unsigned match_any(T value, CUDA_ON_CPU_HERE) const {
    unsigned same = 0;
    for (unsigned rank = 0; rank < size(); ++rank) {
      same |= unsigned(from_rank(value, rank, place) == value) << rank;
    }
    return same;
  }

 protected:
  explicit warp_group(unsigned mask, unsigned meta_rank = 0, unsigned meta_size = 1)
      : thread_group(mask), meta_rank_(meta_rank), meta_size_(meta_size) {}

  unsigned lane_of(unsigned rank) const {
    unsigned rest = mask_;
    while (rank--) rest &= rest - 1;
    return static_cast<unsigned>(__builtin_ctz(rest));
  }
  template <class T>
  T from_rank(T value, unsigned rank, cuda_on_cpu::Place place) const {
    static_assert(std::is_trivially_copyable_v<T>, "a shuffle copies bytes");
    int lane = static_cast<int>(lane_of(rank));
    std::uint64_t words[(sizeof(T) + 7) / 8] = {};
    std::memcpy(words, &value, sizeof value);
    for (std::uint64_t& word : words) {
      word = cuda_on_cpu::shuffle(cuda_on_cpu::WarpCall::shuffle, mask_, word, lane, 32, place);
    }
    std::memcpy(&value, words, sizeof value);
    return value;
  }

  unsigned meta_rank_, meta_size_;
};

template <unsigned Size, class Parent = void>
class thread_block_tile;

template <unsigned Size>
class thread_block_tile<Size, void> : public warp_group {
  static_assert(Size <= 32, "the CPU build has tiles of at most 32 threads, the lanes of a warp");
  static_assert(Size > 0 && (Size & (Size - 1)) == 0, "the size of a tile is a power of two");

 public:
  static constexpr unsigned size() { return Size; }
  static constexpr unsigned num_threads() { return Size; }

 protected:
  explicit thread_block_tile(unsigned parent_rank, unsigned parent_size)
      : warp_group((~0u >> (32 - Size)) << details::lane() / Size * Size, parent_rank / Size,
                   (parent_size + Size - 1) / Size) {}
};

template <unsigned Size, class Parent>
class thread_block_tile : public thread_block_tile<Size, void> {
 public:
  explicit thread_block_tile(const Parent& parent)
      : thread_block_tile<Size, void>(static_cast<unsigned>(parent.thread_rank()),
                                      static_cast<unsigned>(parent.size())) {}
};

template <unsigned Size, class Parent>
thread_block_tile<Size, Parent> tiled_partition(const Parent& parent) {
  return thread_block_tile<Size, Parent>(parent);
}

class coalesced_group;
namespace details {
coalesced_group of_lanes(unsigned lanes, unsigned meta_rank = 0, unsigned meta_size = 1);
}
class coalesced_group : public warp_group {
 private:
  using warp_group::warp_group;
  friend coalesced_group details::of_lanes(unsigned, unsigned, unsigned);
};
inline coalesced_group details::of_lanes(unsigned lanes, unsigned meta_rank, unsigned meta_size) {
  return coalesced_group(lanes, meta_rank, meta_size);
}

// The size of the tiles as a number: their lanes are those of the parent, in turn.
inline thread_group tiled_partition(const thread_group& parent, unsigned size) {
  unsigned first = static_cast<unsigned>(parent.thread_rank()) / size * size, mask = 0, rank = 0;
  if (!parent.mask_) return thread_group((~0u >> (32 - size)) << details::lane() / size * size);
  for (unsigned rest = parent.mask_; rest; rest &= rest - 1, ++rank) {
    if (rank >= first && rank < first + size) mask |= rest & -rest;
  }
  return thread_group(mask);
}

// On a GPU: the lanes that happen to run together. Here: those that come to this line before all
// threads of the block wait.
inline coalesced_group coalesced_threads(CUDA_ON_CPU_HERE) {
  unsigned own = 1u << details::lane();
  return details::of_lanes(static_cast<unsigned>(
      cuda_on_cpu::warp_call(cuda_on_cpu::WarpCall::coalesce, own, 0, 0, 32, place)));
}

namespace details {
template <class Group>
unsigned lanes_of(const Group& group, unsigned ranks) {
  unsigned lanes = 0, rank = 0;
  for (unsigned rest = group.cuda_on_cpu_mask(); rest; rest &= rest - 1, ++rank) {
    if (ranks >> rank & 1) lanes |= rest & -rest;
  }
  return lanes;
}
}  // namespace details

template <class Group>
coalesced_group binary_partition(const Group& group, bool side, CUDA_ON_CPU_HERE) {
  unsigned lanes = details::lanes_of(group, group.ballot(side, place));
  return details::of_lanes(side ? lanes : group.cuda_on_cpu_mask() & ~lanes, !side, 2);
}
template <class Group, class Label>
coalesced_group labeled_partition(const Group& group, Label label, CUDA_ON_CPU_HERE) {
  return details::of_lanes(details::lanes_of(group, group.match_any(label, place)));
}

// The whole grid: its thread blocks run one after another, so they cannot wait for one another.
class grid_group {
 public:
  static unsigned long long num_blocks() {
    return static_cast<unsigned long long>(gridDim.x) * gridDim.y * gridDim.z;
  }
  static unsigned long long block_rank() {
    return blockIdx.x + 1ull * gridDim.x * (blockIdx.y + 1ull * gridDim.y * blockIdx.z);
  }
  static unsigned long long size() { return num_blocks() * details::threads_in_block(); }
  static unsigned long long num_threads() { return size(); }
  static unsigned long long thread_rank() {
    return block_rank() * details::threads_in_block() + details::rank_in_block();
  }
  static dim3 group_dim() { return gridDim; }
  static bool is_valid() { return num_blocks() == 1; }
  CUDA_ON_CPU_RUNTIME static void sync(CUDA_ON_CPU_HERE) {
    if (num_blocks() == 1) return __syncthreads(place);
    cuda_on_cpu::in_kernel = false;
    cuda_on_cpu::fail_in_kernel(
        "grid.sync() with " + std::to_string(num_blocks()) +
            " thread blocks: here they run one after another, so none can wait for another; make "
            "it two kernels, or launch one block",
        place);
  }
};
inline grid_group this_grid() { return {}; }

template <class Group>
void sync(const Group& group, CUDA_ON_CPU_HERE) {
  group.sync(place);
}

// ---- Reductions and scans -------------------------------------------------------------------

#define CUDA_ON_CPU_OPERATION(name, expression)            \
  template <class T>                                       \
  struct name {                                            \
    T operator()(T a, T b) const { return T(expression); } \
  };
CUDA_ON_CPU_OPERATION(plus, a + b)
CUDA_ON_CPU_OPERATION(less, b < a ? b : a)
CUDA_ON_CPU_OPERATION(greater, a < b ? b : a)
CUDA_ON_CPU_OPERATION(bit_and, a& b)
CUDA_ON_CPU_OPERATION(bit_or, a | b)
CUDA_ON_CPU_OPERATION(bit_xor, a ^ b)

template <class Group, class T, class Operation>
T reduce(const Group& group, T value, Operation operation, CUDA_ON_CPU_HERE) {
  unsigned size = group.size();
  if (size & (size - 1)) {  // coalesced lanes
    T total = group.shfl(value, 0, place);
    for (unsigned rank = 1; rank < size; ++rank) {
      total = operation(total, group.shfl(value, static_cast<int>(rank), place));
    }
    return total;
  }
  for (unsigned by = size / 2; by; by /= 2) {
    value = operation(value, group.shfl_xor(value, by, place));
  }
  return value;
}

template <class Group, class T, class Operation = plus<T>>
T inclusive_scan(const Group& group, T value, Operation operation = {}, CUDA_ON_CPU_HERE) {
  for (unsigned by = 1; by < group.size(); by *= 2) {
    T other = group.shfl_up(value, by, place);
    if (group.thread_rank() >= by) value = operation(other, value);
  }
  return value;
}
template <class Group, class T, class Operation = plus<T>>
T exclusive_scan(const Group& group, T value, Operation operation = {}, CUDA_ON_CPU_HERE) {
  T before = group.shfl_up(inclusive_scan(group, value, operation, place), 1, place);
  return group.thread_rank() ? before : T();
}

}  // namespace cooperative_groups
