// 2-d bilinear upsampling of planes (NCHW with batch and channels as planes). With align_corners the corners of input
// and output lie on each other and a scale is (in - 1) / (out - 1); without, pixels are areas and it is in / out. A
// thread finds its weights once and walks over the planes with them. Any block of threads along x, any grid.

struct Tap {
  int first;
  int step;  // to the second value; none at the end of the input
  float weight;  // of the second value
};

__device__ __forceinline__ Tap tap_of(int out, float scale, int extent, bool align_corners) {
  const float source = align_corners ? scale * out : fmaxf(scale * (out + 0.5f) - 0.5f, 0.0f);
  Tap tap;
  tap.first = min((int)source, extent - 1);
  tap.step = tap.first < extent - 1 ? 1 : 0;
  tap.weight = source - tap.first;
  return tap;
}

extern "C" __global__ void upsample_bilinear2d(const float* __restrict__ input, float* __restrict__ output, int planes,
                                               int in_height, int in_width, int out_height, int out_width,
                                               float scale_height, float scale_width, int align_corners) {
  const int pixels = out_height * out_width;
  const size_t in_plane = (size_t)in_height * in_width;
  for (int pixel = blockIdx.x * blockDim.x + threadIdx.x; pixel < pixels; pixel += blockDim.x * gridDim.x) {
    const Tap row = tap_of(pixel / out_width, scale_height, in_height, align_corners != 0);
    const Tap column = tap_of(pixel % out_width, scale_width, in_width, align_corners != 0);
    const float low_row = 1.0f - row.weight, low_column = 1.0f - column.weight;
    const float* corner = input + row.first * in_width + column.first;
    float* target = output + pixel;
    for (int plane = 0; plane < planes; ++plane) {
      const float* below = corner + row.step * in_width;
      *target = low_row * (low_column * corner[0] + column.weight * corner[column.step]) +
                row.weight * (low_column * below[0] + column.weight * below[column.step]);
      corner += in_plane;
      target += pixels;
    }
  }
}
