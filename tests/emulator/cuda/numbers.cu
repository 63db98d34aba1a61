#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <math_constants.h>
template <class T> __device__ void four(T* out, T a, T b, int n) {
  int t = blockIdx.x * blockDim.x + threadIdx.x;
  out[t] = a + b; out[n + t] = a * b; out[2 * n + t] = a / b; out[3 * n + t] = a - b;
}
extern "C" __global__ void halves(half* out, const half* a, const half* b, int n) {
  int t = blockIdx.x * blockDim.x + threadIdx.x;
  four(out, a[t], b[t], n);
  half2 p = __hfma2(make_half2(a[t], b[t]), __half2half2(b[t]), __float2half2_rn(1.0f));
  out[4 * n + t] = p.x; out[5 * n + t] = hsqrt(__habs(a[t])); out[6 * n + t] = __hmax(a[t], b[t]);
}
extern "C" __global__ void bfloats(__nv_bfloat16* out, const __nv_bfloat16* a, const __nv_bfloat16* b, int n) {
  four(out, a[blockIdx.x * blockDim.x + threadIdx.x], b[blockIdx.x * blockDim.x + threadIdx.x], n);
}
extern "C" __global__ void convert(const float* in, half* h, __nv_bfloat16* b, float* back, const double* d, half* hd) {
  int t = blockIdx.x * blockDim.x + threadIdx.x;
  h[t] = __float2half_rn(in[t]); b[t] = __float2bfloat16(in[t]); back[t] = __half2float(h[t]); hd[t] = __half(d[t]);
}
extern "C" __global__ void misc(float* f, int* i) {
  f[0] = rsqrtf(4.0f); f[1] = __expf(1.0f); f[2] = erff(0.5f); f[3] = CUDART_INF_F; f[4] = fmaxf(CUDART_NAN_F, 2.0f);
  f[5] = __int_as_float(0x40490fdb); f[6] = powf(2.0f, 0.5f); f[7] = tanhf(0.3f); f[8] = nearbyintf(2.5f);
  f[9] = max(1.0f, 3.0f); f[10] = (float)exp(1.0); f[11] = __fdividef(1.0f, 4.0f); f[12] = normcdff(0.0f);
  f[13] = erfinvf(0.5f); f[14] = __saturatef(-3.0f); f[15] = __uint2float_rn(4000000000u);
  i[0] = __float_as_int(1.0f); i[1] = __popc(0xF0F0u); i[2] = __clz(1); i[3] = __brev(1u) == 0x80000000u;
  i[4] = __float2int_rn(2.5f); i[5] = __float2int_rz(-2.7f); i[6] = __float2int_rn(1e20f); i[7] = isnan(CUDART_NAN_F);
  i[8] = __dp4a(0x01020304, 0x01010101, 5); i[9] = max(3, -2); i[10] = isinf(f[3]) != 0; i[11] = __umulhi(1u << 31, 4u);
  i[12] = __byte_perm(0x03020100, 0x07060504, 0x7531); i[13] = __half_as_ushort(__float2half(1.0f));
  i[14] = __ffs(8); i[15] = (int)min((long long)7, (long long)9);
  float4 v = make_float4(1, 2, 3, 4); longlong2 w = make_longlong2(5, 6); uchar4 c = make_uchar4(1, 2, 3, 255);
  i[16] = (int)(v.x + v.w) + (int)w.y + c.w; i[17] = sizeof(float4) + alignof(float4) + sizeof(double3) + alignof(half2);
  uint4 packed = make_uint4(0x3C003C00u, 0, 0, 0);
  i[18] = (int)__half2float(((half2*)(&packed.x))->y);
}
