#include <mma.h>
using namespace nvcuda;
template <int m, int n, int k, class T, class A, class LA, class LB> __device__ void product(A* c, const T* a, const T* b) {
  wmma::fragment<wmma::matrix_a, m, n, k, T, LA> fa;
  wmma::fragment<wmma::matrix_b, m, n, k, T, LB> fb;
  wmma::fragment<wmma::accumulator, m, n, k, A> fc;
  wmma::fill_fragment(fc, A(1));
  wmma::load_matrix_sync(fa, a, __is_same(LA, wmma::row_major) ? k : m);
  wmma::load_matrix_sync(fb, b, __is_same(LB, wmma::row_major) ? n : k);
  wmma::mma_sync(fc, fa, fb, fc);
  for (int i = 0; i < fc.num_elements; ++i) fc.x[i] = fc.x[i] * A(2);
  wmma::store_matrix_sync(c, fc, n, wmma::mem_row_major);
}
extern "C" __global__ void a16_rr(float* c, const half* a, const half* b) { product<16, 16, 16, half, float, wmma::row_major, wmma::row_major>(c, a, b); }
extern "C" __global__ void a16_cc(half* c, const half* a, const half* b) { product<16, 16, 16, half, half, wmma::col_major, wmma::col_major>(c, a, b); }
extern "C" __global__ void a8(float* c, const half* a, const half* b) { product<8, 32, 16, half, float, wmma::row_major, wmma::col_major>(c, a, b); }
extern "C" __global__ void a32(float* c, const half* a, const half* b) { product<32, 8, 16, half, float, wmma::col_major, wmma::row_major>(c, a, b); }
extern "C" __global__ void i8(int* c, const signed char* a, const signed char* b) { product<16, 16, 16, signed char, int, wmma::row_major, wmma::col_major>(c, a, b); }
extern "C" __global__ void bf(float* c, const __nv_bfloat16* a, const __nv_bfloat16* b) { product<16, 16, 16, __nv_bfloat16, float, wmma::row_major, wmma::row_major>(c, a, b); }
extern "C" __global__ void half_warp(float* c, const half* a, const half* b) {
  if (threadIdx.x < 16) product<16, 16, 16, half, float, wmma::row_major, wmma::row_major>(c, a, b);
}
extern "C" __global__ void ptx(float* c, half* ch, const half* a, const half* b) {
  __shared__ alignas(16) half sa[16 * 16], sb[16 * 8];
  int t = threadIdx.x;
  for (int i = t; i < 256; i += 32) sa[i] = a[i];
  for (int i = t; i < 128; i += 32) sb[i] = b[i];
  __syncthreads();
  unsigned ra[4], rb[2];
  {
    unsigned int addr = __cvta_generic_to_shared(&sa[t % 16 * 16 + t / 16 * 8]);
    __asm__ __volatile__(
      "ldmatrix.sync.aligned.m8n8.x4.shared.b16"
      "{%0, %1, %2, %3}, [%4];\n"
      : "=r"(ra[0]), "=r"(ra[1]), "=r"(ra[2]), "=r"(ra[3])
      : "r"(addr)
    );
  }
  unsigned int addr;
  asm volatile ("{ .reg .u64 smem_int; cvta.to.shared.u64 smem_int, %1; cvt.u32.u64 %0, smem_int; }"
    : "=r"(addr) : "l"(&sb[t % 16 * 8]));
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared::cta.b16 {%0, %1}, [%2];" : "=r"(rb[0]), "=r"(rb[1]) : "r"(addr));
  float d[4] = {1, 1, 1, 1};
  __asm__ __volatile__(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};\n"
      :  "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(ra[0]), "r"(ra[1]), "r"(ra[2]), "r"(ra[3]), "r"(rb[0]), "r"(rb[1]), "f"(d[0]), "f"(d[1]), "f"(d[2]), "f"(d[3]));
  unsigned h[2] = {0, 0};
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3}, {%4}, {%0, %1};"
      : "+r"(h[0]), "+r"(h[1]) : "r"(ra[0]), "r"(ra[1]), "r"(rb[0]));
  for (int i = 0; i < 4; ++i) {
    int at = (t / 4 + 8 * (i / 2)) * 8 + t % 4 * 2 + i % 2;
    c[at] = d[i];
    ch[at] = ((half*)h)[i];
  }
}

// Words by ldmatrix and one by one, rounded, and multiplied as TF32.
extern "C" __global__ void tf32(float* c, float* rounded, const float* a, const float* b) {
  __shared__ alignas(16) float sa[16 * 8], sb[8 * 8];
  int t = threadIdx.x;
  for (int i = t; i < 128; i += 32) sa[i] = a[i];
  for (int i = t; i < 64; i += 32) sb[i] = b[i];
  __syncthreads();
  float ra[4];
  unsigned addr = __cvta_generic_to_shared(&sa[t % 16 * 8 + t / 16 * 4]);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=f"(ra[0]), "=f"(ra[1]), "=f"(ra[2]), "=f"(ra[3]) : "r"(addr));
  float rb[2] = {sb[t % 4 * 8 + t / 4], sb[(t % 4 + 4) * 8 + t / 4]};
  unsigned wa[4], wb[2];
  for (int i = 0; i < 4; ++i) asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(wa[i]) : "f"(ra[i]));
  for (int i = 0; i < 2; ++i) asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(wb[i]) : "f"(rb[i]));
  float d[4];
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %10, %10, %10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(wa[0]), "r"(wa[1]), "r"(wa[2]), "r"(wa[3]), "r"(wb[0]), "r"(wb[1]), "f"(0.0f));
  for (int i = 0; i < 4; ++i) {
    c[(t / 4 + 8 * (i / 2)) * 8 + t % 4 * 2 + i % 2] = d[i];
    rounded[(t / 4 + 8 * (i % 2)) * 8 + t % 4 + 4 * (i / 2)] = __uint_as_float(wa[i]);
  }
}
