// A driver of GPUs that there are not, and a compiler for them: the functions of CUDA and of NVRTC
// that the runtime calls, under their names. Text is compiled behind the prelude for CPUs; a launch
// runs it on the thread that asks for it, so that what was queued has ended when a call returns.
//
// What is queued on another stream than the usual one is done when it is waited for, and not before:
// who reads too early, or writes too early what is copied, sees the wrong bytes.
//
// GPUs have memory of their own: a launch or a copy that touches what the GPU in use does not have
// fails, and new memory holds no zeros. How many there are, of which architecture and with how many
// bytes, the environment says: FAKE_GPUS=2, FAKE_CAPABILITY=9.0, FAKE_BYTES=1073741824, FAKE_NAME=GPU.
//
// Compiled with COMPILER, the compiler of this machine, its OPTIONS for texts, and files:
// DEVICE_PRELUDE, HOST_PRELUDE, and HOST_OBJECT, which has what texts call behind the latter.

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>
#include <dlfcn.h>
#include <sys/stat.h>
#include <unistd.h>

namespace {

enum Status { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_DEVICE = 101,
              INVALID_IMAGE = 200, INVALID_CONTEXT = 201, NOT_FOUND = 500, ILLEGAL_ADDRESS = 700,
              LAUNCH_FAILED = 719 };

size_t number(const char* name, size_t otherwise) {
  const char* said = getenv(name);
  return said ? strtoull(said, nullptr, 10) : otherwise;
}

size_t gpus() { return number("FAKE_GPUS", 1); }

// Memory of a GPU: where it ends, and whose it is.
struct Allocation {
  uintptr_t end;
  int gpu;
};

std::mutex guard, stream_guard;
std::map<uintptr_t, Allocation> allocations;
size_t used[64];
// The GPU in use, from 1 on; 0 for none.
thread_local int current;

int fails(int status, const char* why) {
  fprintf(stderr, "driver: %s\n", why);
  return status;
}

}  // namespace

// Whether bytes are memory of a GPU.
bool has_memory(int gpu, uintptr_t start, size_t bytes) {
  std::lock_guard<std::mutex> lock(guard);
  auto next = allocations.upper_bound(start);
  if (next == allocations.begin()) return false;
  const auto& [first, allocation] = *std::prev(next);
  return start >= first && start + bytes <= allocation.end && allocation.gpu == gpu;
}
int gpu_in_use() { return current; }

namespace {

bool has(uintptr_t start, size_t bytes) { return has_memory(current, start, bytes); }

// A name for temporary files that nothing has.
std::string fresh(const char* what) {
  static std::atomic<int> next;
  return std::filesystem::temp_directory_path().string() + "/gantline-" + what + "-" + std::to_string(getpid()) + "-" + std::to_string(next++);
}

// Copies that nobody has waited for.
struct Stream {
  int gpu;
  std::vector<std::function<void()>> queued;
  size_t done = 0;

  void run_until(size_t end) {
    for (; done < end; done++) queued[done]();
  }
};
std::vector<Stream*> streams;

// What was queued on a stream before it.
struct Event {
  Stream* stream = nullptr;
  size_t end = 0;
};

struct Module {
  void* library;
};

struct Function {
  void (*call)(void**, unsigned long long, unsigned int);
  const char* (*report)();
  std::string signature;
  int shared = 0;
};

// What a parameter is: a pointer, an integer, or a tensor map.
char kind(const std::string& parameter) {
  if (parameter.find("TENSOR_MAP") != std::string::npos) return 'm';
  return parameter.find('*') != std::string::npos ? 'p' : 'i';
}

// What launches the function of a line of text: `KERNEL(128) name(const float* in0, i64 at) {`.
std::string launcher(const std::string& line) {
  size_t open = line.find(") ") + 2, at = line.find('(', open), end = line.rfind(')');
  std::string name = line.substr(open, at - open), arguments, kinds;
  std::istringstream list(line.substr(at + 1, end - at - 1));
  for (std::string parameter; std::getline(list, parameter, ',');) {
    size_t first = parameter.find_first_not_of(' '), last = parameter.rfind(' ');
    std::string type = parameter.substr(first, last - first), place = std::to_string(kinds.size());
    if (kind(parameter) == 'm') type = "TensorMap";
    arguments += (kinds.empty() ? "" : ", ") + ("*(" + type + "*)p[" + place + "]");
    kinds += kind(parameter);
  }
  std::string text = "extern \"C\" { extern const char " + name + "_signature[]; ";
  text += "const char " + name + "_signature[] = \"" + kinds + "\";\n";
  text += "void " + name + "_call(void** p, unsigned long long blocks, unsigned int threads) {\n";
  text += "  (void)p;\n  shim::launch(blocks, threads, true, 0, [&] { " + name + "(" + arguments;
  return text + "); });\n} }\n";
}

std::string contents(const std::string& path) {
  std::ifstream file(path);
  std::stringstream all;
  all << file.rdbuf();
  return all.str();
}

struct Program {
  std::string text, log, image;
};

// A number of bytes, then as many: what a module is loaded from.
const char MAGIC[8] = {'F', 'A', 'K', 'E', 'C', 'U', 'B', 'N'};

// The layout of the prelude for CPUs, within the bytes that a map has.
struct Map {
  const void* base;
  int count;
  u_int64_t dims[5], strides[4];
  unsigned int box[5], element;
};
static_assert(sizeof(Map) <= 128, "a map has room");

}  // namespace

extern "C" {

int cuInit(unsigned int) { return gpus() ? SUCCESS : NO_DEVICE; }
int cuDeviceGetCount(int* count) { return *count = (int)gpus(), SUCCESS; }
int cuDeviceGet(int* device, int ordinal) {
  if (ordinal < 0 || (size_t)ordinal >= gpus()) return INVALID_DEVICE;
  return *device = ordinal, SUCCESS;
}
int cuDeviceGetName(char* name, int length, int) {
  const char* said = getenv("FAKE_NAME");
  return snprintf(name, length, "%s", said ? said : "a fake GPU"), SUCCESS;
}
int cuDeviceTotalMem_v2(size_t* bytes, int) { return *bytes = number("FAKE_BYTES", 1 << 30), SUCCESS; }
int cuDeviceGetAttribute(int* value, int attribute, int) {
  const char* said = getenv("FAKE_CAPABILITY");
  int major = 9, minor = 0;
  if (said) sscanf(said, "%d.%d", &major, &minor);
  // Multiprocessors, and both numbers of the capability.
  if (attribute == 16) *value = 3;
  else if (attribute == 75) *value = major;
  else if (attribute == 76) *value = minor;
  else return fails(INVALID_VALUE, "an attribute that is not known");
  return SUCCESS;
}

int cuDevicePrimaryCtxRetain(void** context, int device) { return *context = (void*)(uintptr_t)(device + 1), SUCCESS; }
int cuDevicePrimaryCtxRelease_v2(int) { return SUCCESS; }
int cuCtxSetCurrent(void* context) { return current = (int)(uintptr_t)context, SUCCESS; }
int cuStreamQuery(void*) { return current ? SUCCESS : INVALID_CONTEXT; }
int cuCtxSynchronize() {
  std::lock_guard<std::mutex> lock(stream_guard);
  for (Stream* stream : streams) {
    if (stream->gpu == current) stream->run_until(stream->queued.size());
  }
  return current ? SUCCESS : INVALID_CONTEXT;
}

int cuStreamCreate(void** stream, unsigned int flags) {
  // One that waits for the usual stream, and the other way about, overlaps with nothing.
  if (flags != 1) return fails(INVALID_VALUE, "a stream that waits for others");
  std::lock_guard<std::mutex> lock(stream_guard);
  streams.push_back(new Stream{current, {}});
  return *stream = streams.back(), SUCCESS;
}
// Streams stay, as events may know them.
int cuStreamDestroy_v2(void*) { return SUCCESS; }
int cuStreamSynchronize(void* of) {
  std::lock_guard<std::mutex> lock(stream_guard);
  Stream& stream = *(Stream*)of;
  return stream.run_until(stream.queued.size()), SUCCESS;
}
int cuEventCreate(void** event, unsigned int) { return *event = new Event, SUCCESS; }
int cuEventDestroy_v2(void* event) { return delete (Event*)event, SUCCESS; }
int cuEventRecord(void* of, void* on) {
  std::lock_guard<std::mutex> lock(stream_guard);
  Event& event = *(Event*)of;
  event.stream = (Stream*)on;
  return event.end = on ? event.stream->queued.size() : 0, SUCCESS;
}
// What waits goes on when that has ended; what is queued on the usual stream has.
int cuStreamWaitEvent(void* waits, void* of, unsigned int) {
  std::lock_guard<std::mutex> lock(stream_guard);
  Event event = *(Event*)of;
  if (!event.stream) return SUCCESS;
  if (waits) return fails(INVALID_VALUE, "a stream that waits for another one");
  return event.stream->run_until(event.end), SUCCESS;
}
int cuMemHostRegister_v2(void*, size_t, unsigned int) { return SUCCESS; }
int cuMemHostUnregister(void*) { return SUCCESS; }

int cuGetErrorName(int error, const char** name) {
  static const std::map<int, const char*> names = {
      {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},   {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
      {NO_DEVICE, "CUDA_ERROR_NO_DEVICE"},           {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE"},
      {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"}, {NOT_FOUND, "CUDA_ERROR_NOT_FOUND"},
      {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS"}, {LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED"}};
  auto found = names.find(error);
  if (found == names.end()) return INVALID_VALUE;
  return *name = found->second, SUCCESS;
}

int cuMemAlloc_v2(unsigned long long* start, size_t bytes) {
  if (!current) return INVALID_CONTEXT;
  std::lock_guard<std::mutex> lock(guard);
  if (used[current] + bytes > number("FAKE_BYTES", 1 << 30)) return OUT_OF_MEMORY;
  void* memory = aligned_alloc(512, (bytes + 511) / 512 * 512);
  memset(memory, 0xff, bytes);
  allocations[(uintptr_t)memory] = {(uintptr_t)memory + bytes, current};
  used[current] += bytes;
  return *start = (uintptr_t)memory, SUCCESS;
}
int cuMemFree_v2(unsigned long long start) {
  std::lock_guard<std::mutex> lock(guard);
  auto found = allocations.find(start);
  if (found == allocations.end()) return fails(INVALID_VALUE, "memory is freed that is not there");
  used[found->second.gpu] -= found->second.end - start;
  allocations.erase(found);
  return free((void*)start), SUCCESS;
}

int cuMemcpyHtoD_v2(unsigned long long to, const void* from, size_t bytes) {
  if (!has(to, bytes)) return fails(ILLEGAL_ADDRESS, "a copy to what the GPU does not have");
  return memcpy((void*)to, from, bytes), SUCCESS;
}
int cuMemcpyDtoH_v2(void* to, unsigned long long from, size_t bytes) {
  if (!has(from, bytes)) return fails(ILLEGAL_ADDRESS, "a copy of what the GPU does not have");
  return memcpy(to, (const void*)from, bytes), SUCCESS;
}
int cuMemcpyHtoDAsync_v2(unsigned long long to, const void* from, size_t bytes, void* stream) {
  if (!stream || !has(to, bytes)) return fails(ILLEGAL_ADDRESS, "a copy to what the GPU does not have");
  std::lock_guard<std::mutex> lock(stream_guard);
  ((Stream*)stream)->queued.push_back([=] { memcpy((void*)to, from, bytes); });
  return SUCCESS;
}
int cuMemcpyDtoHAsync_v2(void* to, unsigned long long from, size_t bytes, void* stream) {
  if (!stream || !has(from, bytes)) return fails(ILLEGAL_ADDRESS, "a copy of what the GPU does not have");
  std::lock_guard<std::mutex> lock(stream_guard);
  ((Stream*)stream)->queued.push_back([=] { memcpy(to, (const void*)from, bytes); });
  return SUCCESS;
}
int cuMemcpyDtoDAsync_v2(unsigned long long to, unsigned long long from, size_t bytes, void*) {
  if (!has(from, bytes) || !has(to, bytes)) return fails(ILLEGAL_ADDRESS, "a copy beyond memory");
  return memcpy((void*)to, (const void*)from, bytes), SUCCESS;
}
int cuMemcpyPeerAsync(unsigned long long to, void* its, unsigned long long from, void* own, size_t bytes, void*) {
  bool there = has_memory((int)(uintptr_t)its, to, bytes), here = has_memory((int)(uintptr_t)own, from, bytes);
  if (!there || !here || own != (void*)(uintptr_t)current) return fails(ILLEGAL_ADDRESS, "a message between other GPUs");
  return memcpy((void*)to, (const void*)from, bytes), SUCCESS;
}
// Rows of device memory; the layout of CUDA_MEMCPY2D.
struct Rows {
  size_t from_x, from_y;
  unsigned int from_kind;
  const void* from_host;
  unsigned long long from;
  void* from_array;
  size_t from_pitch, to_x, to_y;
  unsigned int to_kind;
  void* to_host;
  unsigned long long to;
  void* to_array;
  size_t to_pitch, width, height;
};
int cuMemcpy2DAsync_v2(const Rows* rows, void*) {
  if (rows->from_kind != 2 || rows->to_kind != 2) return fails(INVALID_VALUE, "rows of another memory");
  if (rows->width > rows->from_pitch || rows->width > rows->to_pitch) return fails(INVALID_VALUE, "rows that overlap");
  for (size_t y = 0; y < rows->height; y++) {
    unsigned long long from = rows->from + y * rows->from_pitch, to = rows->to + y * rows->to_pitch;
    if (!has(from, rows->width) || !has(to, rows->width)) return fails(ILLEGAL_ADDRESS, "rows beyond memory");
    memcpy((void*)to, (const void*)from, rows->width);
  }
  return SUCCESS;
}
int cuMemsetD8_v2(unsigned long long start, unsigned char byte, size_t bytes) {
  if (!has(start, bytes)) return fails(ILLEGAL_ADDRESS, "bytes are set that the GPU does not have");
  return memset((void*)start, byte, bytes), SUCCESS;
}

int cuModuleLoadData(void** module, const void* image) {
  if (memcmp(image, MAGIC, sizeof MAGIC)) return INVALID_IMAGE;
  u_int64_t bytes;
  memcpy(&bytes, (const char*)image + sizeof MAGIC, sizeof bytes);
  // Under a name of its own: what has the name of an opened library is that library.
  std::string path = fresh("module");
  std::ofstream(path).write((const char*)image + sizeof MAGIC + sizeof bytes, bytes);
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  unlink(path.c_str());
  if (!library) return fails(INVALID_IMAGE, dlerror());
  return *module = new Module{library}, SUCCESS;
}
// Functions of it stay: threads that have ended may have some of their memory.
int cuModuleUnload(void* module) { return delete (Module*)module, SUCCESS; }
int cuModuleGetFunction(void** function, void* module, const char* name) {
  void* library = ((Module*)module)->library;
  auto* call = (decltype(Function::call))dlsym(library, (std::string(name) + "_call").c_str());
  auto* signature = (const char*)dlsym(library, (std::string(name) + "_signature").c_str());
  auto* report = (decltype(Function::report))dlsym(library, "shim_report");
  if (!call || !signature || !report) return fails(NOT_FOUND, name);
  return *function = new Function{call, report, signature}, SUCCESS;
}
int cuFuncSetAttribute(void* function, int attribute, int value) {
  // The most bytes of dynamic shared memory.
  if (attribute != 8 || value > 227 << 10) return INVALID_VALUE;
  return ((Function*)function)->shared = value, SUCCESS;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void*, int, size_t) { return *blocks = 1, SUCCESS; }

int cuLaunchKernel(void* asked, unsigned int x, unsigned int y, unsigned int z, unsigned int threads,
                   unsigned int, unsigned int, unsigned int shared, void*, void** parameters, void**) {
  Function& function = *(Function*)asked;
  if (!current) return INVALID_CONTEXT;
  if (!x || y != 1 || z != 1) return fails(INVALID_VALUE, "a grid without blocks");
  if ((int)shared > function.shared) return fails(INVALID_VALUE, "more shared memory than was asked for");
  for (size_t at = 0; at < function.signature.size(); at++) {
    if (function.signature[at] == 'i') continue;
    // A map begins with the address of what it maps.
    uintptr_t start = *(uintptr_t*)parameters[at];
    if (!has(start, 0)) return fails(ILLEGAL_ADDRESS, "a launch on what the GPU does not have");
  }
  function.call(parameters, x, threads);
  const char* found = function.report();
  return *found ? fails(LAUNCH_FAILED, found) : SUCCESS;
}

// The layouts of CUlaunchAttribute and CUlaunchConfig.
struct Attribute {
  int id;
  char pad[4];
  union { char bytes[64]; int allowed; } value;
};
struct Config {
  unsigned int grid[3], block[3], shared;
  void* stream;
  const Attribute* attributes;
  unsigned int count;
};
int cuLaunchKernelEx(const Config* config, void* function, void** parameters, void** extra) {
  for (unsigned int at = 0; at < config->count; at++) {
    // Starts early, which GPUs before sm_90 do not.
    int major = 0;
    cuDeviceGetAttribute(&major, 75, 0);
    if (config->attributes[at].id != 6 || major < 9) return fails(INVALID_VALUE, "a launch of another kind");
  }
  const unsigned int *grid = config->grid, *block = config->block;
  if (block[1] != 1 || block[2] != 1) return fails(INVALID_VALUE, "threads in several dims");
  return cuLaunchKernel(function, grid[0], grid[1], grid[2], block[0], 1, 1, config->shared, config->stream, parameters, extra);
}

int cuTensorMapEncodeTiled(void* to, int kind, unsigned int rank, void* base, const u_int64_t* dims,
                           const u_int64_t* strides, const unsigned int* box, const unsigned int*, int, int, int, int) {
  // Bytes of u8, u16, u32, i32, u64, i64, f16, f32, f64 and bf16, in their order.
  const unsigned int sizes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2};
  if (rank < 1 || rank > 5 || kind > 9 || (uintptr_t)base % 16) return fails(INVALID_VALUE, "no tensor map");
  Map map = {base, (int)rank, {}, {}, {}, sizes[kind]};
  for (unsigned int d = 0; d < rank; d++) {
    map.dims[d] = dims[d], map.box[d] = box[d];
    if (d) map.strides[d - 1] = strides[d - 1];
  }
  memset(to, 0, 128);
  return memcpy(to, &map, sizeof map), SUCCESS;
}

int nvrtcVersion(int* major, int* minor) { return *major = 0, *minor = 0, 0; }
int nvrtcCreateProgram(void** program, const char* text, const char*, int, const char* const*, const char* const*) {
  return *program = new Program{text}, 0;
}
int nvrtcDestroyProgram(void** program) { return delete (Program*)*program, 0; }
int nvrtcCompileProgram(void* asked, int, const char* const*) {
  Program& program = *(Program*)asked;
  std::string prelude = contents(DEVICE_PRELUDE);
  if (program.text.compare(0, prelude.size(), prelude)) return program.log = "another prelude", 6;
  std::string rest = program.text.substr(prelude.size()), launchers;
  std::istringstream lines(rest);
  for (std::string line; std::getline(lines, line);) {
    if (line.compare(0, 7, "KERNEL(") == 0) launchers += launcher(line);
  }
  std::string path = fresh("text"), source = path + "/a.cpp", object = path + "/a.so", log = path + "/log";
  if (mkdir(path.c_str(), 0700)) return program.log = "no folder", 1;
  std::ofstream(source) << rest << "\n" << launchers;
  std::string command = std::string(COMPILER) + " " + OPTIONS + " -shared -include " + HOST_PRELUDE;
  command += " -o " + object + " " + source + " " + HOST_OBJECT + " 2> " + log;
  int status = system(command.c_str());
  program.log = contents(log);
  std::string library = contents(object);
  u_int64_t bytes = library.size();
  program.image = std::string(MAGIC, sizeof MAGIC) + std::string((const char*)&bytes, sizeof bytes) + library;
  for (const std::string& file : {source, object, log}) unlink(file.c_str());
  rmdir(path.c_str());
  return status ? 6 : 0;
}
int nvrtcGetProgramLogSize(void* program, size_t* size) { return *size = ((Program*)program)->log.size() + 1, 0; }
int nvrtcGetProgramLog(void* program, char* log) { return strcpy(log, ((Program*)program)->log.c_str()), 0; }
int nvrtcGetCUBINSize(void* program, size_t* size) { return *size = ((Program*)program)->image.size(), 0; }
int nvrtcGetCUBIN(void* program, char* cubin) {
  const std::string& image = ((Program*)program)->image;
  return memcpy(cubin, image.data(), image.size()), 0;
}

}
