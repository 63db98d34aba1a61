// Grids, blocks, warps and tiles of cooperative groups.
#pragma once

namespace cooperative_groups {

class grid_group {
 public:
  void sync() const { souffle_grid_sync(souffle_self); }
  bool is_valid() const { return true; }
  unsigned long long size() const { return num_blocks() * num_threads_per_block(); }
  unsigned long long num_threads() const { return size(); }
  unsigned long long num_blocks() const { return (unsigned long long)gridDim.x * gridDim.y * gridDim.z; }
  unsigned long long block_rank() const {
    return ((unsigned long long)blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  }
  unsigned long long thread_rank() const { return block_rank() * num_threads_per_block() + souffle_self->linear; }
  dim3 group_dim() const { return gridDim; }
  dim3 dim_blocks() const { return gridDim; }

 private:
  static unsigned num_threads_per_block() { return blockDim.x * blockDim.y * blockDim.z; }
};
inline grid_group this_grid() { return grid_group(); }

class thread_block {
 public:
  void sync() const { souffle_barrier(souffle_self, 0, -1); }
  unsigned size() const { return blockDim.x * blockDim.y * blockDim.z; }
  unsigned num_threads() const { return size(); }
  unsigned thread_rank() const { return souffle_self->linear; }
  dim3 group_index() const { return blockIdx; }
  dim3 thread_index() const { return threadIdx; }
  dim3 group_dim() const { return blockDim; }
  dim3 dim_threads() const { return blockDim; }
};
inline thread_block this_thread_block() { return thread_block(); }

template <unsigned Size, class Parent = void>
class thread_block_tile {
 public:
  void sync() const { __syncwarp(mask()); }
  unsigned size() const { return Size; }
  unsigned num_threads() const { return Size; }
  unsigned thread_rank() const { return souffle_self->lane % Size; }
  unsigned meta_group_rank() const { return souffle_self->linear / Size; }
  unsigned meta_group_size() const { return (blockDim.x * blockDim.y * blockDim.z + Size - 1) / Size; }
  template <class T> T shfl(T v, int source) const { return __shfl_sync(mask(), v, source, Size); }
  template <class T> T shfl_up(T v, unsigned d) const { return __shfl_up_sync(mask(), v, d, Size); }
  template <class T> T shfl_down(T v, unsigned d) const { return __shfl_down_sync(mask(), v, d, Size); }
  template <class T> T shfl_xor(T v, unsigned d) const { return __shfl_xor_sync(mask(), v, int(d), Size); }
  int any(int p) const { return __any_sync(mask(), p); }
  int all(int p) const { return __all_sync(mask(), p); }
  unsigned ballot(int p) const { return (__ballot_sync(mask(), p) >> shift()) & (mask() >> shift()); }

 private:
  static_assert(Size <= 32 && (Size & (Size - 1)) == 0, "a tile has 1, 2, 4, 8, 16 or 32 threads");
  static unsigned shift() { return souffle_self->lane / Size * Size; }
  static unsigned mask() { return (Size == 32 ? 0xFFFFFFFFu : (1u << (Size % 32)) - 1) << shift(); }
};
template <unsigned Size, class Parent>
thread_block_tile<Size, Parent> tiled_partition(const Parent&) {
  return thread_block_tile<Size, Parent>();
}

template <class Group>
void sync(const Group& group) {
  group.sync();
}

}  // namespace cooperative_groups
