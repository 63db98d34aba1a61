#include <cstdint>
#include <cuda_pipeline.h>
__forceinline__ __device__ void ptx_cp_async_legacy_cg_16_4_4(void* dst, int dst_off, void* src, int src_off) {
  uint8_t* dst_p = (uint8_t*)dst + dst_off * 4;
  uint8_t* src_p = (uint8_t*)src + src_off * 4;
  unsigned int dst_addr = __cvta_generic_to_shared(dst_p);
  asm volatile("cp.async.cg.shared.global [%0], [%1], %2;"
    :: "r"(dst_addr), "l"(src_p), "n"(16));
}
__forceinline__ __device__ void predicated(void* dst, void* src, int predicate) {
  unsigned int dst_addr = __cvta_generic_to_shared(dst);
  __asm__ __volatile__(
    "{\n"
    " .reg .pred p;\n"
    " setp.eq.u32 p, %3, 1;\n"
    " @p cp.async.ca.shared.global [%0], [%1], %2;\n"
    " @!p st.shared.u32 [%0], {%4};\n"
    "}\n"
    :: "r"(dst_addr), "l"(src), "n"(4), "r"(predicate), "r"(0)
  );
}
extern "C" __global__ void staged(float* out, float* in, int wait, int stages) {
  __shared__ alignas(16) float box[2][128];
  int t = threadIdx.x;
  for (int s = 0; s < 2; ++s) {
    ptx_cp_async_legacy_cg_16_4_4(box[s], t * 4, in, s * 128 + t * 4);
    asm volatile("cp.async.commit_group;" :  : );
  }
  for (int s = 0; s < stages; ++s) {
    if (wait && s + 1 < stages) asm volatile("cp.async.wait_group 1;" :  :  : "memory");
    else if (wait) asm volatile("cp.async.wait_group %0;" :: "n"(0) : "memory");
    __syncthreads();
    for (int e = 0; e < 4; ++e) out[s * 128 + t * 4 + e] = box[s % 2][127 - (t * 4 + e)];
    __syncthreads();
    if (s + 2 < stages) ptx_cp_async_legacy_cg_16_4_4(box[s % 2], t * 4, in, (s + 2) * 128 + t * 4);
    asm volatile("cp.async.commit_group;");
  }
}
extern "C" __global__ void guarded(float* out, float* in, int limit) {
  __shared__ alignas(16) float a[32], b[32], c[32];
  int t = threadIdx.x;
  predicated(a + t, in + t, t < limit);
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" :: "r"((unsigned)__cvta_generic_to_shared(b + t)), "l"(in + t), "r"(t < limit ? 4 : 0));
  __pipeline_memcpy_async(c + t, in + t, 4);
  asm volatile("cp.async.wait_all;");
  float v;
  asm volatile (
      "{.reg .pred p;\n"
      " setp.ne.b32 p, %2, 0;\n"
      " @!p mov.b32 %0, 0;\n"
      " @p ld.global.nc.f32 %0, [%1];}\n"
      : "=f"(v) : "l"((void*)(in + t)), "r"((int)(t < limit)));
  out[t] = a[t]; out[32 + t] = b[t]; out[64 + t] = c[t]; out[96 + t] = v;
}
extern "C" __global__ void assorted(unsigned* out, unsigned* memory, float x) {
  asm volatile("prefetch.global.L2 [%0];" :: "l"(memory));
  asm volatile("membar.gl;"); asm volatile("fence.acq_rel.gpu;" ::: "memory");
  asm("" : "+r"(out[0]) :: "memory");
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(out[1]));
  asm("add.s32 %0, %1, %2;" : "=r"(out[2]) : "r"(5), "r"(-7));
  asm("{ .reg .b32 lo, hi; mov.b64 {lo, hi}, %1; xor.b32 %0, lo, hi; }" : "=r"(out[3]) : "l"(0x0000000100000002ull));
  float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); out[4] = (unsigned)y;
  asm volatile("atom.global.add.u32 %0, [%1], %2;" : "=r"(out[5]) : "l"(memory), "r"(3u) : "memory");
  asm volatile("st.release.gpu.global.u32 [%0 + 4], %1;" :: "l"(memory), "r"(9u) : "memory");
  asm volatile("ld.volatile.global.v2.u32 {%0, %1}, [%2];" : "=r"(out[6]), "=r"(out[7]) : "l"(memory));
  asm("shr.s32 %0, %1, 31;" : "=r"(out[8]) : "r"(-5));
  asm("cvt.rzi.s32.f32 %0, %1;" : "=r"(out[9]) : "f"(-3.7f));
  asm("{ .reg .pred p; setp.lt.s32 p, %1, 0; selp.b32 %0, %1, 7, p; }" : "=r"(out[10]) : "r"(1));
}
