// 2-d max pooling over planes of height x width (NCHW with batch and channels as planes), with stride, padding and
// dilation. Padding counts as -infinity; a NaN inside a window is its maximum, and the last one of them is its place.
// Any block of threads along x, any grid.
#include <math_constants.h>
#include <stdint.h>

struct Window {
  int begin;
  int end;
};

// The positions of the input that an output position looks at along one dimension, inside the input alone.
__device__ __forceinline__ Window window_of(int out, int stride, int pad, int kernel, int dilation, int extent) {
  Window window;
  window.begin = out * stride - pad;
  window.end = min(window.begin + (kernel - 1) * dilation + 1, extent);
  if (window.begin < 0) window.begin += (-window.begin + dilation - 1) / dilation * dilation;
  return window;
}

extern "C" __global__ void max_pool2d(const float* __restrict__ input, float* __restrict__ output,
                                      int64_t* __restrict__ places, int planes, int in_height, int in_width,
                                      int out_height, int out_width, int kernel_height, int kernel_width,
                                      int stride_height, int stride_width, int pad_height, int pad_width,
                                      int dilation_height, int dilation_width) {
  const int total = planes * out_height * out_width;
  for (int index = blockIdx.x * blockDim.x + threadIdx.x; index < total; index += blockDim.x * gridDim.x) {
    const int out_x = index % out_width;
    const int out_y = index / out_width % out_height;
    const int plane = index / (out_width * out_height);
    const Window rows = window_of(out_y, stride_height, pad_height, kernel_height, dilation_height, in_height);
    const Window columns = window_of(out_x, stride_width, pad_width, kernel_width, dilation_width, in_width);
    const float* values = input + (size_t)plane * in_height * in_width;
    float best = -CUDART_INF_F;
    int place = rows.begin * in_width + columns.begin;
    for (int y = rows.begin; y < rows.end; y += dilation_height) {
      for (int x = columns.begin; x < columns.end; x += dilation_width) {
        const float value = values[y * in_width + x];
        if (value > best || value != value) {
          best = value;
          place = y * in_width + x;
        }
      }
    }
    output[index] = best;
    places[index] = place;
  }
}
