// What files hold beside their kernel k, which is fused with another file of the same names; a file each.

//// names_of_the_file
__device__ int f() { return 3; }
const int Z = 4;
__global__ void k(const int* x, int* y, int n) {
  y[blockIdx.x * blockDim.x + threadIdx.x] = ::f() + ::Z;
}

//// types
typedef unsigned char uchar;
enum { A, B };
using I = int;
constexpr int D = 2;
__global__ void k(const I* x, I* y, I n) {
  y[blockIdx.x * blockDim.x + threadIdx.x] = D + B + uchar(300);
}

//// qualifier_macros
#define RESTRICT __restrict__
#define DEVICE __device__ __forceinline__
#define KERNEL __global__
DEVICE int f(int a) { return a + gridDim.x; }
KERNEL void k(const int* RESTRICT x, int* RESTRICT y, int n) {
  y[blockIdx.x * blockDim.x + threadIdx.x] = f(x[0]);
}

//// loop_macro
#define LOOP(i, n) for (int i = threadIdx.x; i < (n); i += blockDim.x)
__global__ void k(const int* x, int* y, int n) {
  LOOP(i, n)
    y[blockIdx.x * blockDim.x + i] = i * gridDim.x;
}

//// conditional_text
#ifndef N
#define N 7
#endif
#if N > 3
__device__ int f() { return N; }
#else
__device__ int f() { return 0; }
#endif
#undef N
__global__ void k(const int* x, int* y, int n) {
#ifdef N
  y[0] = 1;
#else
  y[blockIdx.x * blockDim.x + threadIdx.x] = f();
#endif
}

//// anonymous_namespace
namespace {
__device__ int f(int a) { return a + blockDim.x; }
__global__ void k(const int* x, int* y, int n) {
  y[blockIdx.x * blockDim.x + threadIdx.x] = f(3);
}
}

//// extern_c
extern "C" {
__device__ int f(int a) { return a + threadIdx.x; }
}
extern "C" __global__ void k(const int* x, int* y, int n) {
  y[blockIdx.x * blockDim.x + threadIdx.x] = f(3);
}

//// overload_of_cuda
__device__ float atomicMax(float* a, float v) { return atomicMax((int*)a, __float_as_int(v)); }
__global__ void k(const int* x, int* y, int n) {
  __shared__ float m;
  if (threadIdx.x == 0) m = 0;
  __syncthreads();
  atomicMax(&m, float(x[threadIdx.x]));
  atomicMax(&y[n * 40], 5);
  __syncthreads();
  y[blockIdx.x * blockDim.x + threadIdx.x] = int(m);
}

//// operators
__device__ int2 operator+(int2 a, int2 b) { return make_int2(a.x + b.y, a.y - b.x); }
__global__ void k(const int* x, int* y, int n) {
  int2 v = make_int2(threadIdx.x, n) + make_int2(3, 4);
  y[blockIdx.x * blockDim.x + threadIdx.x] = v.x + v.y;
}

//// specializations
template <typename T> struct V { static const int v = 1; };
template <> struct V<int> {
  static const int v = 2;
};
template <typename T> __device__ int f() { return 1; }
template <> __device__ int f<int>() { return gridDim.x; }
__global__ void k(const int* x, int* y, int n) {
  y[blockIdx.x * blockDim.x + threadIdx.x] = V<int>::v + f<int>() * 10;
}

//// member_outside
struct Z {
  __device__ int f(int a);
};
__device__ int Z::f(int a) { return a + threadIdx.x; }
__global__ void k(const int* x, int* y, int n) {
  Z z;
  y[blockIdx.x * blockDim.x + threadIdx.x] = z.f(2);
}

//// function_pointer
__device__ int f(int a) {
  __syncthreads();
  return a + threadIdx.x;
}
__global__ void k(const int* x, int* y, int n) {
  int (*g)(int) = f;
  y[blockIdx.x * blockDim.x + threadIdx.x] = g(2);
}

//// shared_of_the_file
__shared__ int held[1024];
__device__ void put(int v) { held[threadIdx.x] = v; }
__global__ void k(const int* x, int* y, int n) {
  put(threadIdx.x);
  __syncthreads();
  y[blockIdx.x * blockDim.x + threadIdx.x] = held[blockDim.x - 1 - threadIdx.x];
}

//// variables
__device__ int counter;
__device__ int table[3] = {1, 2, 3};
__global__ void k(const int* x, int* y, int n) {
  if (threadIdx.x == 0) atomicAdd(&counter, 1);
  y[blockIdx.x * blockDim.x + threadIdx.x] = table[threadIdx.x % 3];
}

//// whole_builtins
__global__ void k(const int* x, int* y, int n) {
  dim3 b = blockDim, g = gridDim;
  uint3 t = threadIdx, q = blockIdx;
  y[blockIdx.x * blockDim.x + threadIdx.x] = b.x + t.x * 3 + g.x * 5 + q.x * 7;
}

//// array_parameters
__global__ void k(const int x[], int (*y)[1], int) {
  y[blockIdx.x * blockDim.x + threadIdx.x][0] = x[1];
}

//// static_kernel
static __global__ void __launch_bounds__(64) k(const int* x, int* y, int n) {
  y[blockIdx.x * blockDim.x + threadIdx.x] = x[3];
}

//// comments_and_strings
__global__ void k(const int* x, int* y, int n) {
  // threadIdx.x
  const char* s = "threadIdx __syncthreads()";
  y[blockIdx.x * blockDim.x + threadIdx.x] = s[3];
}

//// lane
__global__ void k(const int* x, int* y, int n) {
  int t;
  asm("mov.u32 %0, %%laneid;" : "=r"(t));
  y[blockIdx.x * blockDim.x + threadIdx.x] = t;
}

//// labels
__global__ void k(const int* x, int* y, int n) {
  int i = 0;
top:
  i++;
  if (i < 4 + threadIdx.x % 3) goto top;
  y[blockIdx.x * blockDim.x + threadIdx.x] = i;
}

//// grid_through_calls
__device__ int f(int a) { return a + gridDim.x * 100 + blockIdx.x; }
__device__ int g(int a) { return f(a) * 2; }
__global__ void k(const int* x, int* y, int n) {
  y[blockIdx.x * blockDim.x + threadIdx.x] = g(2) + f(1);
}

//// grid_through_macros
#define CALL(a) f(a)
__device__ int f(int a) { return a + gridDim.x * 100 + blockIdx.x; }
__global__ void k(const int* x, int* y, int n) {
  y[blockIdx.x * blockDim.x + threadIdx.x] = CALL(2);
}

//// grid_declared_first
__device__ int f(int);
__global__ void k(const int* x, int* y, int n);
__global__ void k(const int* x, int* y, int n) {
  y[blockIdx.x * blockDim.x + threadIdx.x] = f(2);
}
__device__ int f(int a) { return a + gridDim.x * 100 + blockIdx.x; }


//// grid_by_default
__device__ int f(int a, int b = 4) { return a + b + gridDim.x; }
__global__ void k(const int* x, int* y, int n) {
  y[blockIdx.x * blockDim.x + threadIdx.x] = f(2);
}

//// grid_in_a_lambda
__global__ void k(const int* x, int* y, int n) {
  auto g = [=](int a) { return a + gridDim.x; };
  y[blockIdx.x * blockDim.x + threadIdx.x] = g(2);
}

//// grid_without_arguments
__device__ int f(void) { return gridDim.x; }
__global__ void k(const int* x, int* y, int n) {
  y[blockIdx.x * blockDim.x + threadIdx.x] = f();
}

//// grid_of_a_template
template <int M> __device__ int f(int a) { return gridDim.x * M; }
__global__ void k(const int* x, int* y, int n) {
  y[blockIdx.x * blockDim.x + threadIdx.x] = f<3>(2);
}

//// recursion
__device__ int f(int a) { return a ? f(a - 1) + gridDim.x : 0; }
__global__ void k(const int* x, int* y, int n) {
  y[blockIdx.x * blockDim.x + threadIdx.x] = f(3);
}

//// barrier_of_the_file
__global__ void k(const int* x, int* y, int n) {
  __shared__ int s[1024];
  s[threadIdx.x] = threadIdx.x;
  __syncthreads();
  y[blockIdx.x * blockDim.x + threadIdx.x] = s[(threadIdx.x + 5) % blockDim.x];
  ::__syncthreads();
}

//// names_like_those_of_cuda
__device__ float minf(float a, float b) { return a < b ? a : b; }
__device__ void atomicMaxFloat(float* a, float v) { atomicMax((int*)a, __float_as_int(v)); }
__device__ int max(int a, int b, int c) { return max(max(a, b), c); }
__global__ void k(const int* x, int* y, int n) {
  __shared__ float m;
  if (threadIdx.x == 0) m = 0;
  __syncthreads();
  atomicMaxFloat(&m, minf(x[threadIdx.x], 50.0f));
  __syncthreads();
  y[blockIdx.x * blockDim.x + threadIdx.x] = max(int(m), x[0], x[1]);
}

//// names_of_parameters
__global__  // a comment
    /* and another */ void k(const int* place, int* blocks, int grid) {
  blocks[blockIdx.x * blockDim.x + threadIdx.x] = place[0] + grid + gridDim.x;
}
