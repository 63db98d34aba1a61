// Entry points of the text's kernels. The table of them follows the text.
#ifndef SOUFFLE_ENTRY_H
#define SOUFFLE_ENTRY_H

#define SOUFFLE_EXPORT extern "C" __attribute__((visibility("default")))

template <class P> struct SouffleKind { static constexpr char value = __is_enum(P) ? 'i' : '?'; };
template <class P> struct SouffleKind<P*> { static constexpr char value = 'p'; };
#define SOUFFLE_KIND(P, letter) \
  template <> struct SouffleKind<P> { static constexpr char value = letter; };
SOUFFLE_KIND(bool, 'i')
SOUFFLE_KIND(char, 'i')
SOUFFLE_KIND(signed char, 'i')
SOUFFLE_KIND(unsigned char, 'i')
SOUFFLE_KIND(short, 'i')
SOUFFLE_KIND(unsigned short, 'i')
SOUFFLE_KIND(int, 'i')
SOUFFLE_KIND(unsigned int, 'i')
SOUFFLE_KIND(long, 'i')
SOUFFLE_KIND(unsigned long, 'i')
SOUFFLE_KIND(long long, 'i')
SOUFFLE_KIND(unsigned long long, 'i')
SOUFFLE_KIND(float, 'f')
SOUFFLE_KIND(double, 'f')
struct __half;
struct __nv_bfloat16;
SOUFFLE_KIND(__half, 'f')
SOUFFLE_KIND(__nv_bfloat16, 'f')

template <class P, char kind> struct SouffleConvert;
template <class P> struct SouffleConvert<P, 'p'> { static P from(const SouffleArg& a) { return (P)a.p; } };
template <class P> struct SouffleConvert<P, 'i'> { static P from(const SouffleArg& a) { return (P)a.i; } };
template <class P> struct SouffleConvert<P, 'f'> { static P from(const SouffleArg& a) { return P(a.d); } };
// Such a kernel can be compiled but not launched: the launch is refused before it gets here.
template <class P> struct SouffleConvert<P, '?'> { static P from(const SouffleArg& a) { return *(P*)a.p; } };

template <class P> struct SouffleBare { typedef P type; };
template <class P> struct SouffleBare<const P> { typedef P type; };
template <class P> struct SouffleBare<P&> { typedef P type; };

template <int... index> struct SouffleSequence {};
template <auto kernel, class... P, int... index>
SOUFFLE_INLINE void souffle_call(const SouffleArg* args, SouffleSequence<index...>) {
  kernel(SouffleConvert<typename SouffleBare<P>::type, SouffleKind<typename SouffleBare<P>::type>::value>::from(args[index])...);
}
template <auto kernel, class... P>
static SOUFFLE_UNCHECKED void souffle_enter(const SouffleArg* args) {
  souffle_call<kernel, P...>(args, SouffleSequence<__integer_pack(sizeof...(P))...>());
}
template <class... P> struct SouffleKinds {
  static constexpr char text[] = {SouffleKind<typename SouffleBare<P>::type>::value..., 0};
};
template <auto kernel, class... P>
constexpr SouffleKernel souffle_describe(const char* name, void (*)(P...)) {
  return SouffleKernel{name, souffle_enter<kernel, P...>, int(sizeof...(P)), SouffleKinds<P...>::text};
}

// What a library has once, however many texts it is made of.
#ifndef SOUFFLE_PART
// Any address in the thread-local segment, which holds the shared memory of the running block.
static thread_local __attribute__((aligned(1024))) char souffle_anchor[1024];
SOUFFLE_EXPORT char* souffle_shared_anchor() { return souffle_anchor; }
#endif

// All dynamic shared arrays begin at one address, as on a GPU.
#define SOUFFLE_DYNAMIC_SHARED(bytes, labels)                                                                   \
  asm(".pushsection .tbss,\"awT\",@nobits\n.balign 1024\n.hidden souffle_dynamic\n.globl souffle_dynamic\n"      \
      ".type souffle_dynamic, @object\nsouffle_dynamic:\n" labels "\n.zero " #bytes "\n.popsection\n");           \
  extern __thread __attribute__((visibility("hidden"))) char souffle_dynamic[bytes];                             \
  SOUFFLE_EXPORT char* souffle_dynamic_shared() { return souffle_dynamic; }

#endif
