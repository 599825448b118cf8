// Parts as a CPU has them: a block's threads are fibers, switched where they meet.
//
// Blocks run one after the other on the thread that launches. Where threads never meet they are a
// loop. The order in which threads run follows from the seed. Shared memory holds a pattern of no
// numbers before each block. What waits forever is a deadlock, and ends the program with the place.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>
#include <sys/mman.h>

#define PART inline
#define KERNEL(THREADS) static void
#define TABLE static const
#define __restrict__ __restrict
// Room of the block; the first thread to come finds it filled with no numbers.
#define SHARED(T, NAME, COUNT)                           \
  static thread_local T NAME[COUNT];                     \
  static thread_local u_int64_t NAME##_of = 0;           \
  if (NAME##_of != shim::serial) {                       \
    memset((void*)NAME, 0xff, sizeof NAME);              \
    NAME##_of = shim::serial;                            \
  }

inline float float_of_bits(unsigned int bits) { float x; memcpy(&x, &bits, 4); return x; }
inline unsigned int bits_of(float x) { unsigned int bits; memcpy(&bits, &x, 4); return bits; }
inline double double_of_bits(unsigned long long bits) { double x; memcpy(&x, &bits, 8); return x; }

struct Index { unsigned int x, y, z; };

namespace shim {

// A thread of a block.
struct Fiber {
  void* stack_pointer;
  Index index;
  const char* waits;
  bool is_done;
};

// Who waits at one place, and for how many.
struct Meeting {
  std::vector<Fiber*> waiting;
};

struct Block {
  std::vector<Fiber> fibers;
  std::vector<Fiber*> ready;
  size_t head = 0;
  Fiber* current = nullptr;
  void* caller = nullptr;
  size_t alive = 0;
  std::function<void()> body;
  Meeting all;
  std::vector<Meeting> warps;
  // What each thread shows to the others of its warp.
  std::vector<const void*> shown;
};

inline thread_local Block block;
inline thread_local std::vector<char*> stacks;
// The number of the block, of all that this thread has run.
inline thread_local u_int64_t serial = 0;
inline thread_local Index thread_index, block_index, block_size;

const size_t STACK = 64 << 10;

extern "C" void shim_switch(void** from, void* to);
#if defined(__x86_64__)
asm(".text\n.weak shim_switch\nshim_switch:\n"
    " pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
    " movq %rsp,(%rdi)\n movq %rsi,%rsp\n"
    " popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n ret\n");
#else
#error "fibers are written for x86-64"
#endif

// Goes on with whoever is ready, or back to who launched.
inline void next() {
  Block& b = block;
  Fiber* from = b.current;
  if (b.head == b.ready.size()) {
    b.current = nullptr;
    void* nowhere;
    shim_switch(from ? &from->stack_pointer : &nowhere, b.caller);
    return;
  }
  Fiber* to = b.ready[b.head++];
  if (to == from) return;
  b.current = to;
  thread_index = to->index;
  shim_switch(&from->stack_pointer, to->stack_pointer);
}

inline void begin() {
  block.body();
  block.current->is_done = true;
  block.alive -= 1;
  next();
  abort();
}

inline void meet(Meeting& meeting, size_t count, const char* place) {
  Block& b = block;
  Fiber* me = b.current;
  if (meeting.waiting.size() + 1 < count) {
    meeting.waiting.push_back(me);
    me->waits = place;
    next();
    me->waits = nullptr;
    return;
  }
  for (Fiber* other : meeting.waiting) b.ready.push_back(other);
  meeting.waiting.clear();
}

inline unsigned int lane() { return (unsigned int)(block.current - block.fibers.data()); }

inline void run_block(unsigned int threads, u_int64_t seed) {
  Block& b = block;
  while (stacks.size() < threads) {
    void* room = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (room == MAP_FAILED) { fprintf(stderr, "no room for the stacks of a block\n"); abort(); }
    stacks.push_back((char*)room);
  }
  b.fibers.assign(threads, Fiber{});
  b.warps.assign((threads + 31) / 32, Meeting{});
  b.shown.assign(threads, nullptr);
  b.all.waiting.clear();
  b.ready.clear();
  b.head = 0;
  b.alive = threads;
  for (unsigned int i = 0; i < threads; i++) {
    Fiber& fiber = b.fibers[i];
    fiber.index = Index{i, 0, 0};
    void** top = (void**)(stacks[i] + STACK) - 1;
    *--top = (void*)begin;
    for (int saved = 0; saved < 6; saved++) *--top = nullptr;
    fiber.stack_pointer = top;
    b.ready.push_back(&fiber);
  }
  for (unsigned int i = threads; seed && i > 1; i--) {
    seed = seed * 6364136223846793005ULL + 1442695040888963407ULL;
    std::swap(b.ready[i - 1], b.ready[(seed >> 33) % i]);
  }
  b.current = b.ready[b.head++];
  thread_index = b.current->index;
  shim_switch(&b.caller, b.current->stack_pointer);
  if (b.alive) {
    fprintf(stderr, "deadlock in block %u:", block_index.x);
    for (Fiber& fiber : b.fibers) {
      if (fiber.waits) fprintf(stderr, " thread %u waits at %s;", fiber.index.x, fiber.waits);
    }
    fprintf(stderr, " %zu threads are not done\n", b.alive);
    abort();
  }
}

// Runs a function on a grid; `meets` says whether its threads wait for each other.
template <class F> void launch(u_int64_t blocks, unsigned int threads, bool meets, u_int64_t seed, F f) {
  block_size = Index{threads, 1, 1};
  if (meets) block.body = f;
  for (u_int64_t at = 0; at < blocks; at++) {
    block_index = Index{(unsigned int)at, 0, 0};
    serial += 1;
    if (meets) {
      run_block(threads, seed ? seed + at : 0);
      continue;
    }
    for (unsigned int i = 0; i < threads; i++) {
      thread_index = Index{seed & 1 ? threads - 1 - i : i, 0, 0};
      f();
    }
  }
}

}  // namespace shim

#define threadIdx shim::thread_index
#define blockIdx shim::block_index
#define blockDim shim::block_size

inline void meet_block() { shim::meet(shim::block.all, shim::block.fibers.size(), "meet_block"); }
inline void meet_warp() {
  size_t warp = shim::lane() / 32, all = shim::block.fibers.size();
  size_t members = all - 32 * warp < 32 ? all - 32 * warp : 32;
  shim::meet(shim::block.warps[warp], members, "meet_warp");
}
template <class T> T of_lane(T x, int lane) {
  unsigned int me = shim::lane();
  shim::block.shown[me] = &x;
  meet_warp();
  T found = *(const T*)shim::block.shown[me / 32 * 32 + (unsigned int)lane];
  meet_warp();
  return found;
}
template <class T> T swapped(T x, int bits) { return of_lane(x, (int)(shim::lane() % 32) ^ bits); }
