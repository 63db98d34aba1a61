// The instructions that inline PTX is translated to (see ptx_translation.py). A PTX register is 64 bits wide here; each
// instruction reads and writes the part of it that its type names.
#ifndef SOUFFLE_PTX_H
#define SOUFFLE_PTX_H

typedef unsigned long long souffle_reg;

template <class T>
SOUFFLE_INLINE T souffle_get(souffle_reg r) {
  T v;
  memcpy((void*)&v, &r, sizeof(T));
  return v;
}
template <class T>
SOUFFLE_INLINE souffle_reg souffle_put(T v) {
  souffle_reg r = 0;
  memcpy(&r, (const void*)&v, sizeof(T));
  return r;
}

// Operands: the constraint letter says how wide the C++ expression is taken.
template <class T> struct SouffleUnderlying { static souffle_reg of(T v) { return (souffle_reg)(v); } };
template <class T> struct SouffleUnderlying<T*> { static souffle_reg of(T* v) { return (souffle_reg)(size_t)v; } };
template <class T> SOUFFLE_INLINE souffle_reg souffle_in_r(T v) { return (unsigned)SouffleUnderlying<T>::of(v); }
template <class T> SOUFFLE_INLINE souffle_reg souffle_in_h(T v) { return (unsigned short)SouffleUnderlying<T>::of(v); }
template <class T> SOUFFLE_INLINE souffle_reg souffle_in_l(T v) { return SouffleUnderlying<T>::of(v); }
template <class T> SOUFFLE_INLINE souffle_reg souffle_in_n(T v) { return SouffleUnderlying<T>::of(v); }
SOUFFLE_INLINE souffle_reg souffle_in_f(float v) { return souffle_put(v); }
SOUFFLE_INLINE souffle_reg souffle_in_d(double v) { return souffle_put(v); }
template <class T> SOUFFLE_INLINE void souffle_out_r(T& to, souffle_reg v) { to = (T)(unsigned)v; }
template <class T> SOUFFLE_INLINE void souffle_out_h(T& to, souffle_reg v) { to = (T)(unsigned short)v; }
template <class T> SOUFFLE_INLINE void souffle_out_l(T& to, souffle_reg v) { to = (T)v; }
SOUFFLE_INLINE void souffle_out_f(float& to, souffle_reg v) { to = souffle_get<float>(v); }
SOUFFLE_INLINE void souffle_out_d(double& to, souffle_reg v) { to = souffle_get<double>(v); }

SOUFFLE_INLINE char* souffle_shared(souffle_reg address) {
  if ((unsigned)address >= souffle_self->shared_size) souffle_fail(souffle_self, "a shared address lies outside shared memory");
  return souffle_self->shared_base + (unsigned)address;
}
SOUFFLE_INLINE char* souffle_global(souffle_reg address) { return (char*)(size_t)address; }

template <class T>
SOUFFLE_INLINE souffle_reg souffle_load_as(const char* p) {
  T v;
  memcpy((void*)&v, p, sizeof(T));
  return souffle_put(v);
}
template <class T>
SOUFFLE_INLINE void souffle_store_as(char* p, souffle_reg r) {
  memcpy(p, &r, sizeof(T));
}
// Loads that a loop may poll with, and stores that another thread may poll for.
template <class T>
SOUFFLE_INLINE souffle_reg souffle_load_polled(const char* p) {
  souffle_relax(souffle_self);
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  souffle_reg r = souffle_load_as<T>(p);
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  return r;
}
template <class T>
SOUFFLE_INLINE void souffle_store_published(char* p, souffle_reg r) {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  souffle_store_as<T>(p, r);
  souffle_event(souffle_self);
}
template <class T, class F>
SOUFFLE_INLINE souffle_reg souffle_atomic_as(char* p, F next) {
  return souffle_put(souffle_atomic((T*)p, next));
}
// Those that say how they order the accesses of blocks, at the scope of the device or the system.
template <class T>
SOUFFLE_INLINE souffle_reg souffle_load_acquire(const char* p) {
  typedef typename SouffleWord<sizeof(T)>::type Word;
  typedef Word __attribute__((may_alias)) Alias;
  souffle_relax(souffle_self);
  souffle_reg r = souffle_put(__atomic_load_n((const Alias*)p, __ATOMIC_ACQUIRE));
  souffle_order_acquire(souffle_self, p);
  return r;
}
template <class T>
SOUFFLE_INLINE void souffle_store_release(char* p, souffle_reg r) {
  typedef typename SouffleWord<sizeof(T)>::type Word;
  typedef Word __attribute__((may_alias)) Alias;
  souffle_order_release(souffle_self, p, kSouffleStores);
  __atomic_store_n((Alias*)p, souffle_get<Word>(r), __ATOMIC_RELEASE);
  souffle_progress(souffle_self);
}
template <class T, bool acquires, bool releases, int how, class F>
SOUFFLE_INLINE souffle_reg souffle_atomic_ordered(char* p, F next) {
  if (releases) souffle_order_release(souffle_self, p, how);
  if (!acquires && !releases) souffle_order_relaxed(souffle_self);
  souffle_reg r = souffle_put(souffle_atomic((T*)p, next, true));
  if (acquires) souffle_order_acquire(souffle_self, p);
  return r;
}

// A whole-warp instruction: every lane must take part.
struct SouffleWhole {
  void* payload;
  SouffleWarpFunction function;
  bool complete;
};
static inline SOUFFLE_UNCHECKED void souffle_check_whole(void** payloads, unsigned mask) {
  void* inner[32] = {};
  SouffleWarpFunction function = nullptr;
  for (int lane = 0; lane < 32; ++lane) {
    if (!(mask >> lane & 1)) continue;
    auto* w = (SouffleWhole*)payloads[lane];
    w->complete = mask == 0xFFFFFFFFu;
    inner[lane] = w->payload;
    // Lanes that are at different instructions are as bad as absent ones.
    if (function && function != w->function) mask = 0;
    function = w->function;
  }
  if (mask == 0xFFFFFFFFu) {
    function(inner, mask);
    return;
  }
  for (int lane = 0; lane < 32; ++lane)
    if (inner[lane]) ((SouffleWhole*)payloads[lane])->complete = false;
}
SOUFFLE_INLINE void souffle_whole_warp(const char* what, void* payload, SouffleWarpFunction function) {
  SouffleWhole w{payload, function, false};
  souffle_collective(souffle_self, 0xFFFFFFFFu, what, &w, souffle_check_whole);
  if (!w.complete) souffle_fail(souffle_self, "a warp-wide matrix instruction is not executed by all 32 lanes");
}

// ---- ldmatrix: lane 8*i + r points at row r of matrix i; lane l receives elements 2*(l%4), +1 of row l/4 ----
struct SouffleLoadMatrix {
  const char* row;
  unsigned out[4];
};
template <int matrices, bool transposed>
static void souffle_ldmatrix_all(void** payloads, unsigned) {
  for (int i = 0; i < matrices; ++i)
    for (int lane = 0; lane < 32; ++lane) {
      unsigned short pair[2];
      for (int e = 0; e < 2; ++e) {
        int row = transposed ? lane % 4 * 2 + e : lane / 4, column = transposed ? lane / 4 : lane % 4 * 2 + e;
        memcpy(&pair[e], ((SouffleLoadMatrix*)payloads[8 * i + row])->row + 2 * column, 2);
      }
      ((SouffleLoadMatrix*)payloads[lane])->out[i] = unsigned(pair[0]) | unsigned(pair[1]) << 16;
    }
}
template <int matrices, bool transposed>
SOUFFLE_INLINE void souffle_ldmatrix(souffle_reg* const* out, souffle_reg address) {
  SouffleLoadMatrix m;
  // Only the addresses of the first 8 * matrices lanes are read.
  m.row = int(souffle_self->lane) < 8 * matrices ? souffle_shared(address) : nullptr;
  if ((size_t)address % 16 && m.row) souffle_fail(souffle_self, "ldmatrix from an address that is not a multiple of 16");
  souffle_whole_warp("ldmatrix", &m, souffle_ldmatrix_all<matrices, transposed>);
  for (int i = 0; i < matrices; ++i) *out[i] = m.out[i];
}

// ---- mma.sync with m = 16, n = 8 ----
struct SouffleHalfBits { unsigned short bits; };
struct SouffleBfloatBits { unsigned short bits; };
struct SouffleTf32Bits { unsigned bits; };
SOUFFLE_INLINE float souffle_half_value(unsigned short bits) {
#ifdef __FLT16_MANT_DIG__
  return float(souffle_bits<_Float16>(bits));
#else
  unsigned exponent = bits >> 10 & 31, mantissa = bits & 1023;
  float v = exponent == 31 ? (mantissa ? NAN : HUGE_VALF)
            : exponent     ? ldexpf(float(mantissa + 1024), int(exponent) - 25)
                           : ldexpf(float(mantissa), -24);
  return bits & 0x8000 ? -v : v;
#endif
}
SOUFFLE_INLINE float souffle_value(SouffleHalfBits v) { return souffle_half_value(v.bits); }
SOUFFLE_INLINE float souffle_value(SouffleBfloatBits v) { return souffle_bits<float>(unsigned(v.bits) << 16); }
SOUFFLE_INLINE float souffle_value(SouffleTf32Bits v) { return souffle_bits<float>(v.bits & ~0x1FFFu); }
SOUFFLE_INLINE int souffle_value(signed char v) { return v; }
SOUFFLE_INLINE int souffle_value(unsigned char v) { return v; }

struct SouffleMma {
  unsigned a[4], b[4], c[4];
};
template <int k, class A, class B, class T, bool half_accumulator>
static SOUFFLE_UNCHECKED void souffle_mma_all(void** payloads, unsigned) {
  constexpr int per = 4 / int(sizeof(A));        // elements in one register
  constexpr int pieces = k / (4 * per);          // registers along k
  T a[16][k], b[k][8], c[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    auto* p = (SouffleMma*)payloads[lane];
    int group = lane / 4, t = lane % 4;
    for (int piece = 0; piece < pieces; ++piece)
      for (int e = 0; e < per; ++e) {
        int at = piece * 4 * per + t * per + e;
        for (int high = 0; high < 2; ++high) {
          A v;
          memcpy(&v, (char*)&p->a[piece * 2 + high] + e * sizeof(A), sizeof(A));
          a[group + 8 * high][at] = T(souffle_value(v));
        }
        B w;
        memcpy(&w, (char*)&p->b[piece] + e * sizeof(B), sizeof(B));
        b[at][group] = T(souffle_value(w));
      }
    for (int i = 0; i < 4; ++i) {
      int row = group + 8 * (i / 2), column = 2 * t + i % 2;
      if (half_accumulator)
        c[row][column] = T(souffle_half_value((unsigned short)(p->c[i / 2] >> (16 * (i % 2)))));
      else
        memcpy((void*)&c[row][column], &p->c[i], 4);
    }
  }
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < k; ++j)
      for (int l = 0; l < 8; ++l) c[i][l] += a[i][j] * b[j][l];
  for (int lane = 0; lane < 32; ++lane) {
    auto* p = (SouffleMma*)payloads[lane];
    int group = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) {
      T v = c[group + 8 * (i / 2)][2 * t + i % 2];
      if (!half_accumulator) {
        memcpy(&p->c[i], (void*)&v, 4);
      } else {
#ifdef __FLT16_MANT_DIG__
        unsigned bits = souffle_bits<unsigned short>(_Float16(v));
        p->c[i / 2] = i % 2 ? (p->c[i / 2] & 0xFFFFu) | bits << 16 : bits;
#endif
      }
    }
  }
}
template <int k, class A, class B, class T, bool half_accumulator>
SOUFFLE_INLINE void souffle_mma(SouffleMma& m) {
#ifndef __FLT16_MANT_DIG__
  static_assert(!half_accumulator, "mma.sync with an f16 accumulator needs a compiler with _Float16");
#endif
  souffle_whole_warp("mma.sync", &m, souffle_mma_all<k, A, B, T, half_accumulator>);
}

SOUFFLE_INLINE bool souffle_elect(unsigned mask) {
  return souffle_self->lane == unsigned(__builtin_ctz(souffle_ballot(mask, true, "elect.sync")));
}

#endif
