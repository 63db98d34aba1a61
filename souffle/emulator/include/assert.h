// A failed assertion ends the launch with an error, not the process.
#undef assert
#ifdef NDEBUG
#define assert(x) ((void)0)
#else
#define SOUFFLE_TEXT_(x) #x
#define SOUFFLE_TEXT(x) SOUFFLE_TEXT_(x)
#define assert(x) ((x) ? (void)0 : souffle_fail(souffle_self, "assertion failed: " #x ", line " SOUFFLE_TEXT(__LINE__)))
#endif
