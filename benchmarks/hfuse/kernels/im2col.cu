// The columns of an image for a convolution as a matrix product: channels x height x width becomes
// (channels * kernel_height * kernel_width) x (out_height * out_width), with zeros where a window leaves the image. A
// thread writes the kernel_height * kernel_width values of one window and channel. Any block along x, any grid.

// An index in [0, extent): negative ones wrap to large numbers.
#define INSIDE(i, extent) ((unsigned)(i) < (unsigned)(extent))

extern "C" __global__ void im2col(const float* __restrict__ image, float* __restrict__ columns, int channels,
                                  int height, int width, int out_height, int out_width, int kernel_height,
                                  int kernel_width, int pad_height, int pad_width, int stride_height,
                                  int stride_width, int dilation_height, int dilation_width) {
  const int total = channels * out_height * out_width;
  for (int index = blockIdx.x * blockDim.x + threadIdx.x; index < total; index += blockDim.x * gridDim.x) {
    const int out_x = index % out_width;
    const int out_y = index / out_width % out_height;
    const int channel = index / (out_width * out_height);
    const int top = out_y * stride_height - pad_height, left = out_x * stride_width - pad_width;
    const float* plane = image + (size_t)channel * height * width;
    float* target = columns + ((size_t)channel * kernel_height * kernel_width * out_height + out_y) * out_width + out_x;
    for (int i = 0; i < kernel_height; ++i) {
      for (int j = 0; j < kernel_width; ++j) {
        const int y = top + i * dilation_height, x = left + j * dilation_width;
        *target = INSIDE(y, height) && INSIDE(x, width) ? plane[y * width + x] : 0.0f;
        target += (size_t)out_height * out_width;
      }
    }
  }
}
