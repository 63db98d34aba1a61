// As much of CUDA's driver and runtime as TVM's own runtime calls, for a board without a GPU (played_board.py): kernels are
// those that the emulator compiled of the same CUDA text, device memory is the host's, and time is that of two clocks, of
// the host, which queues, and of the device, which works.
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace {

enum Status { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_IMAGE = 200, NOT_FOUND = 500, ILLEGAL_ADDRESS = 700,
              NOT_SUPPORTED = 801 };
constexpr uint64_t START = 0xcbf29ce484222325ull;
constexpr size_t ALIGNMENT = 256;
constexpr double LAUNCH_US = 3, RECORD_US = 1, BYTES_PER_US = 1e6;
constexpr int ALLOWED_SHARED = 48 * 1024;

// What souffle/emulator/src/fiber_runtime.cpp calls SouffleLaunchSpec and SouffleLaunchResult; sizes are compared.
struct Argument {
  long long i;
  double d;
  void* p;
};
struct Entry {
  const char* name;
  void (*entry)(const Argument*);
  int parameters;
  const char* kinds;
};
struct Spec {
  const char* kernel;
  void (*entry)(const Argument*);
  const Argument* args;
  unsigned grid[3], block[3];
  uint64_t shared_bytes, dynamic_capacity, seed;
  int cooperative, shuffled, workers;
  double timeout_seconds, spin_seconds;
  char* (*dynamic_shared)();
  char* (*shared_anchor)();
  void *arena, *traffic;
  const uint64_t* shared_range;
  void* finding;
  unsigned shared_ranges;
  int finding_capacity, releases;
  void* wait;
  int wait_capacity;
};
struct Result {
  int failed, waits;
  uint64_t grid_syncs, block_barriers, fault_address;
  double seconds;
  uint64_t shared[3];
  int findings, synchronizes;
  uint64_t findings_left_out, half_barriers;
  char message[2048];
};

struct Module {
  void *runtime, *library;
  int kernels, workers;
};
struct Function {
  Module* module;
  Entry entry;
  int allowed = ALLOWED_SHARED;
  double cold_us = -1, warm_us = -1;
  // What its arguments were after it has run: it need not run again where that is what is there.
  std::map<std::vector<uint64_t>, uint64_t> left;
  bool warm = false;
};

// CUlaunchConfig of cuda.h.
struct LaunchConfig {
  unsigned grid[3], block[3], shared;
  void *stream, *attributes;
  unsigned count;
};

std::mutex lock;
std::string folder() {
  const char* path = getenv("PLAYED_BOARD");
  return path ? path : ".";
}
std::map<std::string, std::string> settings;
std::map<uintptr_t, size_t> memory;
std::set<uintptr_t> written;
std::set<Function*> functions;
double host_us = 0, device_us = 0;
int broken = SUCCESS;

std::string setting(const std::string& name, const char* otherwise) {
  if (settings.empty()) {
    std::ifstream lines(folder() + "/device");
    for (std::string line; std::getline(lines, line);) {
      size_t middle = line.find('=');
      if (middle != std::string::npos) settings[line.substr(0, middle)] = line.substr(middle + 1);
    }
  }
  auto found = settings.find(name);
  return found == settings.end() ? otherwise : found->second;
}

// Whether something is to go wrong now: once for a file of its name, always for one that says so.
bool fault(const std::string& kind, const std::string& kernel = "") {
  for (const std::string& name : {kind, kind + "@" + kernel}) {
    std::string path = folder() + "/faults/" + name;
    if (access((path + ".always").c_str(), F_OK) == 0 || unlink(path.c_str()) == 0) return true;
  }
  return false;
}

void work(double us) {
  double slower = 1 + atof(setting("drift", "0").c_str()) * device_us * 1e-6;
  device_us = std::max(device_us, host_us) + us * slower;
}

uint64_t digest(const void* data, size_t size, uint64_t value) {
  const unsigned char* bytes = static_cast<const unsigned char*>(data);
  for (size_t i = 0; i < size; ++i) value = (value ^ bytes[i]) * 0x100000001b3ull;
  return value;
}

// The driver is given no length: it reads the image's own.
size_t image_bytes(const unsigned char* image) {
  auto field = [&](int offset, int size) {
    uint64_t value = 0;
    memcpy(&value, image + offset, size);
    return value;
  };
  return std::max({uint64_t(64), field(0x28, 8) + field(0x3a, 2) * field(0x3c, 2), field(0x20, 8) + field(0x36, 2) * field(0x38, 2)});
}

bool inside(uintptr_t address, size_t bytes, uintptr_t* begin = nullptr, size_t* size = nullptr) {
  auto after = memory.upper_bound(address);
  if (after == memory.begin()) return false;
  --after;
  if (begin) *begin = after->first, *size = after->second;
  return address + bytes <= after->first + after->second;
}

int run(Function& function, const LaunchConfig& config, void** parameters) {
  const Entry& entry = function.entry;
  std::vector<Argument> arguments(std::max(1, entry.parameters));
  std::vector<uint64_t> key{config.grid[0], config.block[0], config.shared};
  std::vector<std::pair<uintptr_t, size_t>> reached;
  size_t bytes = 0;
  for (int i = 0; i < entry.parameters; ++i) {
    Argument& argument = arguments[i];
    if (entry.kinds[i] == 'p') {
      argument.p = *static_cast<void**>(parameters[i]);
      std::pair<uintptr_t, size_t> piece;
      if (!inside(uintptr_t(argument.p), 1, &piece.first, &piece.second)) return broken = ILLEGAL_ADDRESS;
      reached.push_back(piece);
      written.insert(piece.first);
      bytes += piece.second;
      key.push_back(uintptr_t(argument.p));
    } else {
      int value = *static_cast<int*>(parameters[i]);
      float number;
      memcpy(&number, &value, 4);
      argument.i = value, argument.d = number;
      key.push_back(unsigned(value));
    }
  }
  double warm = function.warm_us >= 0 ? function.warm_us : 1 + 1e-4 * config.grid[0] * config.block[0];
  double cold = function.cold_us >= 0 ? function.cold_us : warm + bytes / BYTES_PER_US;
  work((function.warm ? warm : cold) * (fault("slow", entry.name) ? 50 : 1));
  function.warm = true;
  auto content = [&] {
    uint64_t value = START;
    for (auto [begin, size] : reached) value = digest(reinterpret_cast<void*>(begin), size, value);
    return value;
  };
  if (fault("lost", entry.name)) return SUCCESS;
  auto left = function.left.find(key);
  if (left == function.left.end() || left->second != content()) {
    Spec spec{};
    Result result{};
    spec.kernel = entry.name, spec.entry = entry.entry, spec.args = arguments.data();
    std::copy(config.grid, config.grid + 3, spec.grid);
    std::copy(config.block, config.block + 3, spec.block);
    spec.shared_bytes = config.shared, spec.workers = function.module->workers;
    spec.timeout_seconds = 600, spec.spin_seconds = 10;
    spec.dynamic_shared = reinterpret_cast<char* (*)()>(dlsym(function.module->library, "souffle_dynamic_shared"));
    spec.shared_anchor = reinterpret_cast<char* (*)()>(dlsym(function.module->library, "souffle_shared_anchor"));
    spec.dynamic_capacity = spec.dynamic_shared ? 227 * 1024 : 0;
    std::vector<char> waits(64 * 256);
    spec.wait = waits.data();
    reinterpret_cast<void (*)(const Spec*, Result*)>(dlsym(function.module->runtime, "souffle_launch"))(&spec, &result);
    if (result.failed || result.waits) {
      fprintf(stderr, "played board: %s\n", result.message);
      return broken = ILLEGAL_ADDRESS;
    }
    function.left[key] = content();
  }
  if (reached.empty()) return SUCCESS;
  auto [begin, size] = reached.back();
  if (fault("nan", entry.name)) memset(reinterpret_cast<void*>(begin), 0xff, size), function.left.erase(key);
  if (fault("wrong", entry.name)) reinterpret_cast<unsigned char*>(begin)[std::min<size_t>(3, size - 1)] ^= 0x40, function.left.erase(key);
  return SUCCESS;
}

}  // namespace

#define PLAYED extern "C" __attribute__((visibility("default"))) int
#define GUARD                                  \
  std::lock_guard<std::mutex> guard(lock);     \
  if (broken != SUCCESS) return broken

// The driver.

// The name under which the kernels of an image are kept; 17 bytes with its end.
PLAYED played_key(const void* image, char* key) {
  const unsigned char* bytes = static_cast<const unsigned char*>(image);
  snprintf(key, 17, "%016llx", (unsigned long long)digest(bytes, image_bytes(bytes), START));
  return SUCCESS;
}

PLAYED cuGetErrorName(int status, const char** name) {
  static const std::map<int, const char*> names = {{0, "CUDA_SUCCESS"}, {1, "CUDA_ERROR_INVALID_VALUE"}, {2, "CUDA_ERROR_OUT_OF_MEMORY"},
      {200, "CUDA_ERROR_INVALID_IMAGE"}, {500, "CUDA_ERROR_NOT_FOUND"}, {700, "CUDA_ERROR_ILLEGAL_ADDRESS"}, {801, "CUDA_ERROR_NOT_SUPPORTED"}};
  auto found = names.find(status);
  *name = found == names.end() ? "CUDA_ERROR_UNKNOWN" : found->second;
  return SUCCESS;
}
PLAYED cuGetErrorString(int status, const char** text) { return cuGetErrorName(status, text); }

PLAYED cuDeviceGetName(char* name, int length, int) {
  snprintf(name, length, "%s", setting("name", "played board (no GPU)").c_str());
  return SUCCESS;
}

PLAYED cuModuleLoadData(Module** module, const void* image) {
  GUARD;
  char key[17];
  played_key(image, key);
  std::string about = folder() + "/kernels/" + key;
  if (access(about.c_str(), F_OK) != 0 && std::system(("'" + folder() + "/compile' " + key + " 1>&2").c_str()) != 0) return INVALID_IMAGE;
  std::ifstream lines(about);
  std::string runtime, library;
  Module held{};
  if (!std::getline(lines, runtime) || !std::getline(lines, library) || !(lines >> held.kernels >> held.workers)) return INVALID_IMAGE;
  // Global: the kernels' library finds the runtime's functions by name.
  held.runtime = dlopen(runtime.c_str(), RTLD_NOW | RTLD_GLOBAL);
  held.library = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!held.runtime || !held.library) {
    fprintf(stderr, "played board: %s\n", dlerror());
    return INVALID_IMAGE;
  }
  auto size = [&](const char* name) { return reinterpret_cast<uint64_t (*)()>(dlsym(held.runtime, name))(); };
  if (size("souffle_spec_size") != sizeof(Spec) || size("souffle_result_size") != sizeof(Result)) {
    fprintf(stderr, "played board: the emulator's structures are others; compare played_cuda.cpp with them\n");
    return INVALID_IMAGE;
  }
  *module = new Module(held);
  return SUCCESS;
}

PLAYED cuModuleUnload(Module*) { return SUCCESS; }

PLAYED cuModuleGetFunction(Function** function, Module* module, const char* name) {
  GUARD;
  const Entry* table = static_cast<const Entry*>(dlsym(module->library, "souffle_kernels"));
  for (const Entry* row = table; row < table + module->kernels; ++row) {
    if (strcmp(row->name, name) == 0) {
      *function = new Function{module, *row};
      functions.insert(*function);
      std::ifstream costs(folder() + "/costs");
      std::string kernel;
      for (double cold, warm; costs >> kernel >> cold >> warm;)
        if (kernel == name) (*function)->cold_us = cold, (*function)->warm_us = warm;
      return SUCCESS;
    }
  }
  return NOT_FOUND;
}

PLAYED cuFuncSetAttribute(Function* function, int which, int value) {
  GUARD;
  if (which != 8 || value < 0 || value > atoi(setting("shared", "232448").c_str())) return INVALID_VALUE;
  function->allowed = value;
  return SUCCESS;
}

PLAYED cuLaunchKernelEx(const LaunchConfig* config, Function* function, void** parameters, void**) {
  GUARD;
  const char* name = function->entry.name;
  if (FILE* log = fopen((folder() + "/log").c_str(), "a")) {
    fprintf(log, "%d %s %u %u %u %u %u %u %u %d %u\n", getpid(), name, config->grid[0], config->grid[1], config->grid[2], config->block[0],
            config->block[1], config->block[2], config->shared, function->allowed, config->count);
    fclose(log);
  }
  if (int(config->shared) > function->allowed) return INVALID_VALUE;
  if (fault("die", name)) kill(getpid(), SIGKILL);
  while (fault("hang", name)) sleep(3600);
  if (fault("fault", name)) return broken = ILLEGAL_ADDRESS;
  host_us += LAUNCH_US;
  return run(*function, *config, parameters);
}

PLAYED cuTensorMapEncodeTiled() { return NOT_SUPPORTED; }

// The runtime.

PLAYED cudaGetDeviceCount(int* count) { return *count = 1, SUCCESS; }
PLAYED cudaGetDevice(int* device) { return *device = 0, SUCCESS; }
PLAYED cudaSetDevice(int device) { return device == 0 ? SUCCESS : 101; }

PLAYED cudaDeviceGetAttribute(int* value, int which, int) {
  const std::map<int, std::string> held = {{1, "1024"}, {2, "1024"}, {3, "1024"}, {4, "64"}, {8, "49152"}, {10, "32"}, {12, "65536"},
      {13, "1000000"}, {16, setting("multiprocessors", "2")}, {38, setting("l2", "1048576")}, {75, setting("major", "9")}, {76, setting("minor", "0")}};
  auto found = held.find(which);
  if (found == held.end()) return INVALID_VALUE;
  return *value = atoi(found->second.c_str()), SUCCESS;
}

PLAYED cudaMemGetInfo(size_t* left, size_t* all) { return *left = *all = size_t(8) << 30, SUCCESS; }

PLAYED cudaMalloc(void** address, size_t bytes) {
  GUARD;
  size_t whole = (std::max<size_t>(bytes, 1) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  *address = whole > (size_t(8) << 30) ? nullptr : aligned_alloc(ALIGNMENT, whole);
  if (!*address) return OUT_OF_MEMORY;
  memory[uintptr_t(*address)] = bytes;
  if (whole < (1 << 20)) memset(*address, 0xa5, whole);
  return SUCCESS;
}

PLAYED cudaFree(void* address) {
  std::lock_guard<std::mutex> guard(lock);
  if (address && !memory.erase(uintptr_t(address))) return INVALID_VALUE;
  written.erase(uintptr_t(address));
  free(address);
  return SUCCESS;
}

PLAYED cudaMemcpyAsync(void* target, const void* source, size_t bytes, int kind, void*) {
  GUARD;
  if ((kind != 2 && !inside(uintptr_t(target), bytes)) || (kind != 1 && !inside(uintptr_t(source), bytes))) return INVALID_VALUE;
  uintptr_t from = 0, to = 0;
  size_t size = 0;
  if (kind != 1) inside(uintptr_t(source), bytes, &from, &size);
  if (kind != 2) inside(uintptr_t(target), bytes, &to, &size);
  // What nobody has written holds nothing that a copy could bring.
  if (kind != 3 || written.count(from)) {
    memcpy(target, source, bytes);
    written.insert(to);
  }
  host_us += LAUNCH_US;
  work(1 + 2 * bytes / BYTES_PER_US);
  if (kind == 3 && bytes >= size_t(atol(setting("l2", "1048576").c_str())))
    for (Function* function : functions) function->warm = false;
  return SUCCESS;
}

PLAYED cudaEventCreate(double** event) { return *event = new double(0), SUCCESS; }
PLAYED cudaEventDestroy(double* event) { return delete event, SUCCESS; }
PLAYED cudaEventRecord(double* event, void*) {
  GUARD;
  host_us += RECORD_US;
  device_us = std::max(device_us, host_us);
  *event = device_us;
  return SUCCESS;
}
PLAYED cudaStreamSynchronize(void*) {
  GUARD;
  host_us = std::max(host_us, device_us) + RECORD_US;
  return SUCCESS;
}
PLAYED cudaEventSynchronize(double*) { return cudaStreamSynchronize(nullptr); }
PLAYED cudaEventElapsedTime(float* ms, double* start, double* stop) {
  GUARD;
  *ms = fault("nan-time") ? NAN : fault("no-time") ? 0 : (*stop - *start) * 1e-3;
  return SUCCESS;
}

PLAYED cudaStreamCreate(void** stream) { return *stream = nullptr, SUCCESS; }
PLAYED cudaStreamCreateWithFlags(void** stream, unsigned) { return *stream = nullptr, SUCCESS; }
PLAYED cudaStreamDestroy(void*) { return SUCCESS; }
PLAYED cudaStreamWaitEvent(void*, double*, unsigned) { return SUCCESS; }
PLAYED cudaPeekAtLastError() { return broken; }
PLAYED cudaGetLastError() { return broken; }
extern "C" __attribute__((visibility("default"))) const char* cudaGetErrorName(int status) {
  const char* name;
  cuGetErrorName(status, &name);
  return name;
}
extern "C" __attribute__((visibility("default"))) const char* cudaGetErrorString(int status) { return cudaGetErrorName(status); }

// What a stage alone never asks for.
#define LEFT_OUT(name) PLAYED name() { return NOT_SUPPORTED; }
LEFT_OUT(cudaFreeHost)
LEFT_OUT(cudaMallocHost)
LEFT_OUT(cudaGetDeviceProperties)
LEFT_OUT(cudaGraphDestroy)
LEFT_OUT(cudaGraphExecDestroy)
LEFT_OUT(cudaGraphInstantiate)
LEFT_OUT(cudaGraphLaunch)
LEFT_OUT(cudaMemcpyPeerAsync)
LEFT_OUT(cudaStreamBeginCapture)
LEFT_OUT(cudaStreamEndCapture)
