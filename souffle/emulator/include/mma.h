// nvcuda::wmma. A fragment is distributed over the warp: lane l holds the elements l*n to l*n + n - 1 of the tile, counted
// row by row. CUDA leaves the distribution open, so no text may rely on another one.
#pragma once
#include "cuda_bf16.h"
#include "cuda_fp16.h"

namespace nvcuda {
namespace wmma {

struct matrix_a {};
struct matrix_b {};
struct accumulator {};
struct row_major {};
struct col_major {};
enum layout_t { mem_row_major, mem_col_major };

namespace precision {
struct tf32 {};
}  // namespace precision

// Storage and arithmetic types of an element type.
template <class T> struct souffle_element { typedef T stored; typedef float computed; };
template <> struct souffle_element<signed char> { typedef signed char stored; typedef int computed; };
template <> struct souffle_element<unsigned char> { typedef unsigned char stored; typedef int computed; };
template <> struct souffle_element<int> { typedef int stored; typedef int computed; };
template <> struct souffle_element<double> { typedef double stored; typedef double computed; };
template <> struct souffle_element<precision::tf32> { typedef float stored; typedef float computed; };

template <class Use, int m, int n, int k> struct souffle_extent;
template <int m, int n, int k> struct souffle_extent<matrix_a, m, n, k> { enum { rows = m, columns = k }; };
template <int m, int n, int k> struct souffle_extent<matrix_b, m, n, k> { enum { rows = k, columns = n }; };
template <int m, int n, int k> struct souffle_extent<accumulator, m, n, k> { enum { rows = m, columns = n }; };

template <class Use, int m, int n, int k, class T, class Layout = void>
class fragment {
 public:
  typedef typename souffle_element<T>::stored element_type;
  typedef element_type storage_element_type;
  enum {
    rows = souffle_extent<Use, m, n, k>::rows,
    columns = souffle_extent<Use, m, n, k>::columns,
    num_elements = rows * columns / 32,
    num_storage_elements = num_elements
  };
  element_type x[num_elements];
};

template <class F>
SOUFFLE_INLINE void souffle_load(F& f, const typename F::element_type* p, unsigned row, unsigned column) {
  unsigned first = souffle_self->lane * F::num_elements;
  for (unsigned i = 0; i < F::num_elements; ++i)
    f.x[i] = p[(first + i) / F::columns * row + (first + i) % F::columns * column];
}

template <class Use, int m, int n, int k, class T>
SOUFFLE_INLINE void load_matrix_sync(fragment<Use, m, n, k, T, row_major>& f,
                                     const typename souffle_element<T>::stored* p, unsigned stride) {
  souffle_load(f, p, stride, 1);
}
template <class Use, int m, int n, int k, class T>
SOUFFLE_INLINE void load_matrix_sync(fragment<Use, m, n, k, T, col_major>& f,
                                     const typename souffle_element<T>::stored* p, unsigned stride) {
  souffle_load(f, p, 1, stride);
}
template <int m, int n, int k, class T>
SOUFFLE_INLINE void load_matrix_sync(fragment<accumulator, m, n, k, T>& f, const T* p, unsigned stride, layout_t layout) {
  if (layout == mem_row_major)
    souffle_load(f, p, stride, 1);
  else
    souffle_load(f, p, 1, stride);
}
template <int m, int n, int k, class T>
SOUFFLE_INLINE void store_matrix_sync(T* p, const fragment<accumulator, m, n, k, T>& f, unsigned stride, layout_t layout) {
  typedef fragment<accumulator, m, n, k, T> F;
  unsigned first = souffle_self->lane * F::num_elements;
  unsigned row = layout == mem_row_major ? stride : 1, column = layout == mem_row_major ? 1 : stride;
  for (unsigned i = 0; i < F::num_elements; ++i)
    p[(first + i) / F::columns * row + (first + i) % F::columns * column] = f.x[i];
}
template <class Use, int m, int n, int k, class T, class Layout, class V>
SOUFFLE_INLINE void fill_fragment(fragment<Use, m, n, k, T, Layout>& f, const V& value) {
  for (int i = 0; i < int(fragment<Use, m, n, k, T, Layout>::num_elements); ++i)
    f.x[i] = typename souffle_element<T>::stored(value);
}
SOUFFLE_INLINE float __float_to_tf32(float v) { return souffle_to_tf32(v); }

template <class D, class A, class B, class C>
struct souffle_product {
  D* d;
  const A* a;
  const B* b;
  const C* c;
};
template <class T, class F>
SOUFFLE_INLINE void souffle_widen(const F* f, unsigned lane, T* tile) {
  for (int i = 0; i < int(F::num_elements); ++i) tile[lane * F::num_elements + i] = T(f->x[i]);
}
// The last lane to arrive computes the product for all.
template <int m, int n, int k, class T, class D, class A, class B, class C>
static __attribute__((noinline)) SOUFFLE_UNCHECKED void souffle_multiply(void** payloads, unsigned) {
  typedef souffle_product<D, A, B, C> P;
  T a[m * k], b[k * n], c[m * n];
  for (unsigned lane = 0; lane < 32; ++lane) {
    P* p = (P*)payloads[lane];
    souffle_widen(p->a, lane, a);
    souffle_widen(p->b, lane, b);
    souffle_widen(p->c, lane, c);
  }
  for (int i = 0; i < m; ++i)
    for (int j = 0; j < k; ++j) {
      T left = a[i * k + j];
      for (int l = 0; l < n; ++l) c[i * n + l] += left * b[j * n + l];
    }
  for (unsigned lane = 0; lane < 32; ++lane) {
    P* p = (P*)payloads[lane];
    for (int i = 0; i < int(D::num_elements); ++i)
      p->d->x[i] = typename D::element_type(c[lane * D::num_elements + i]);
  }
}
template <int m, int n, int k, class TD, class TA, class LA, class TB, class LB, class TC>
SOUFFLE_INLINE void mma_sync(fragment<accumulator, m, n, k, TD>& d, const fragment<matrix_a, m, n, k, TA, LA>& a,
                             const fragment<matrix_b, m, n, k, TB, LB>& b, const fragment<accumulator, m, n, k, TC>& c,
                             bool = false) {
  typedef fragment<accumulator, m, n, k, TD> D;
  typedef fragment<matrix_a, m, n, k, TA, LA> A;
  typedef fragment<matrix_b, m, n, k, TB, LB> B;
  typedef fragment<accumulator, m, n, k, TC> C;
  souffle_product<D, A, B, C> p{&d, &a, &b, &c};
  souffle_whole_warp("wmma::mma_sync", &p, souffle_multiply<m, n, k, typename souffle_element<TA>::computed, D, A, B, C>);
}

}  // namespace wmma
}  // namespace nvcuda
