// The prelude for CPUs: threads of a block are fibers, switched at barriers.
//
// Blocks run one after the other on the thread that launches; those of a function that take turns
// are there several at a time, and are switched where they take turns and at barriers of the block.
// Where threads never synchronise they are a loop. The order of threads, and of blocks, follows from
// the seed. Shared memory is filled with NaNs before each block. A deadlock within a block ends the
// program, and names the barriers that threads wait at; one of blocks is reported.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>
#include <sys/mman.h>

#define PART inline
#define KERNEL(THREADS) static void
#define KERNEL_OF_CLUSTERS(THREADS, BLOCKS) static void
#define TABLE static const
#define UNROLL
#define UNROLL_4
#define NO_UNROLL
#define __restrict__ __restrict
// Shared memory of the block, with guards before and after it that no thread may access.
#define SHARED(T, NAME, COUNT) \
  T* NAME = (T*)shim::shared_array(#NAME, 128 * sizeof(T), sizeof(T) * (COUNT))

inline float float_of_bits(unsigned int bits) { float x; memcpy(&x, &bits, 4); return x; }
inline unsigned int bits_of(float x) { unsigned int bits; memcpy(&bits, &x, 4); return bits; }
inline double double_of_bits(unsigned long long bits) { double x; memcpy(&x, &bits, 8); return x; }

inline unsigned int opaque(unsigned int x) { return x; }

inline unsigned int rounded_bits(unsigned int, unsigned int, unsigned int, unsigned int, unsigned int);
inline unsigned short bf16_bits(float x) {
  unsigned int u = bits_of(x);
  if ((u & 0x7fffffff) > 0x7f800000) return (unsigned short)(u >> 16 | 0x40);
  return (unsigned short)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
inline unsigned short f16_bits(float x) {
  unsigned int u = bits_of(x), sign = u >> 16 & 0x8000, a = u & 0x7fffffff;
  if (a > 0x7f800000) return (unsigned short)(sign | 0x7e00);
  if (a >= 0x477ff000) return (unsigned short)(sign | 0x7c00);
  return (unsigned short)(sign | rounded_bits(a, 0x38800000, 0x3f000000, 0x38000000, 13));
}
inline float f16_number(unsigned short bits) {
  unsigned int sign = (unsigned int)(bits & 0x8000) << 16, exponent = bits >> 10 & 31, mantissa = bits & 1023;
  if (exponent == 0) return float_of_bits(sign | bits_of((float)mantissa * 5.9604645e-8f));
  if (exponent == 31) return float_of_bits(sign | 0x7f800000 | mantissa << 13);
  return float_of_bits(sign | (exponent + 112) << 23 | mantissa << 13);
}
inline float larger_or_nan(float a, float b) { return a != a || a > b ? a : b; }
inline float smaller_or_nan(float a, float b) { return a != a || a < b ? a : b; }
inline float normal_reciprocal(float x) { return 1.0f / x; }

struct Index { unsigned int x, y, z; };
struct TensorMap;

namespace shim {

// An asynchronous copy, which is done when it is waited for, and not before.
struct Copy {
  void* to;
  const void* from;
  size_t bytes;
  u_int64_t group;
};

// What TMA stores: where it lies in shared memory, and what that held when the store began; and of
// what is written when it ends, and not before, how.
struct TmaStore {
  size_t start;
  std::vector<unsigned char> held;
  bool is_committed, is_read;
  std::function<void()> end;
};

// A thread of a block.
struct Fiber {
  void* stack_pointer;
  Index index;
  const char* waits;
  bool is_done;
  std::vector<Copy> copies;
  u_int64_t group;
  // Barriers that it has passed: of the block, and of the warp.
  unsigned int blocks, warps;
  // How often it has met the other blocks of its cluster, and told others whether something is so.
  unsigned int clusters, votes;
  // How often it has met others: at those, at barriers in memory, and by instructions of a warpgroup.
  u_int64_t meetings;
  // What it has written to shared memory since it fenced that from TMA, as first and last bytes.
  std::vector<std::pair<size_t, size_t>> unfenced;
  std::vector<TmaStore> stores;
  // Whether it has waited for a turn, and whether TMA has written for it, since it last fenced global
  // memory from TMA.
  bool has_waited, has_stored;
};

// The threads that wait at a barrier.
struct Barrier {
  std::vector<Fiber*> waiting;
};

// An mbarrier: arrivals and bytes that its phase still waits for, and the parity of the phase.
struct Mbarrier {
  long arrivals = 0, pending = 0, bytes = 0;
  unsigned int parity = 0;
  bool is_known = false;
  Fiber* owner = nullptr;
  std::vector<Fiber*> waiting;
};

// A product of a warpgroup that is not done: it reads shared memory until its group is waited for.
struct Multiplication {
  std::vector<std::pair<size_t, size_t>> reads;
  std::function<void()> run;
  u_int64_t group;
};

// A copy by TMA that is under way, to some bytes of shared memory.
struct TmaLoad {
  size_t start, bytes;
  std::function<void()> run;
};

// What a warpgroup has issued.
struct Warpgroup {
  Barrier barrier;
  std::vector<Multiplication> pending;
  u_int64_t group = 0;
  bool is_fenced = false;
  // Registers of each thread; as many as the launch gave, where there are none.
  unsigned int registers = 0;
};

// An array in shared memory, between guards of `before` bytes.
struct Shadow;
struct SharedArray {
  const char* name;
  unsigned char* start;
  size_t before, bytes;
  Shadow* shadow;
};

// What a thread stores to the shared memory of another block of its cluster, whose threads see it
// when all of the cluster have met, and not before.
struct ClusterStore {
  unsigned int rank;
  std::string array;
  size_t at;
  std::vector<unsigned char> value;
};

// Blocks that have each other's shared memory. `passed` is for each the barriers of its threads until
// those of the cluster last met, and now.
struct Cluster {
  std::map<std::pair<unsigned int, std::string>, SharedArray> arrays;
  std::vector<ClusterStore> stores;
  std::deque<unsigned int> arrived;
  std::vector<unsigned int> passed, now;
  std::vector<u_int64_t> serials;
};

// A thread that waits until a counter in global memory is a number.
struct TurnWait {
  const unsigned int* counter;
  unsigned int turn;
  Fiber* fiber;
};

const size_t ARRAYS = 16;

struct Block {
  Index index = {};
  // Its number, of all that this thread has run.
  u_int64_t serial = 0;
  std::vector<char*> stacks;
  std::vector<Fiber> fibers;
  std::vector<Fiber*> ready;
  size_t head = 0;
  Fiber* current = nullptr;
  void* caller = nullptr;
  size_t alive = 0;
  Barrier all;
  std::vector<Barrier> warps;
  // For each thread what a collective of its warp reads.
  std::vector<const void*> shown;
  std::vector<Warpgroup> warpgroups;
  // Barriers that have a number.
  std::map<unsigned int, Barrier> named;
  // Whether a thread has said so, at each of the meetings at a barrier of a number: zero is that of
  // the block.
  std::map<unsigned int, std::deque<bool>> votes;
  std::map<const void*, Mbarrier> mbarriers;
  // Copies that are under way: they end when no thread can go on, in any order.
  std::deque<TmaLoad> copies;
  // Threads that sleep until no other can go on; those of the slow warp, if there is one, until all
  // others sleep for good.
  std::vector<Fiber*> asleep, slow;
  size_t slow_warp = ~(size_t)0;
  // Zero where threads and copies keep their order.
  u_int64_t random = 0;
  bool interleaves = false;
  unsigned char* dynamic = nullptr;
  size_t dynamic_bytes = 0;
  std::vector<unsigned char> room;
  SharedArray arrays[ARRAYS];
  size_t array_count = 0;
  std::vector<TurnWait> turns;
  // Whether all others go on first, as long as they can.
  bool is_held = false;
  // It is moved, never copied: what runs points into what it has.
  Block() = default;
  Block(Block&&) = default;
  Block& operator=(Block&&) = default;
};

// The block that runs; all others that are there are kept by the launch.
inline thread_local Block block;
// The same for hooks, where its threads run: theirs must not be called for it.
inline thread_local Block* running = nullptr;
// What each thread runs.
inline thread_local std::function<void()> body;
// Counters that blocks of a launch have taken tickets of.
inline thread_local std::set<const unsigned int*> ticketed;
// How many blocks there may be at a time.
inline thread_local u_int64_t residents = 1;
// Blocks of a cluster, and the clusters that have begun.
inline thread_local unsigned int cluster_blocks = 1;
inline thread_local std::map<unsigned int, Cluster> clusters;
// The first finding since it was last asked for.
inline thread_local char report[256];
// Stacks of no block.
inline thread_local std::vector<char*> stacks;
// Arrays of no block, to be used again.
inline thread_local std::vector<SharedArray> arrays_left;
// The number of the block that runs, and of the last one that has begun.
inline thread_local u_int64_t serial = 0, serial_last = 0;
inline thread_local Index thread_index, block_index, block_size, grid_size;

const size_t STACK = 64 << 10;

// What is known of the accesses to an array in shared memory.
Shadow* new_shadow(size_t bytes);
// Blocks of the launch share some bytes of a buffer by turns: accesses are looked at from now on.
void share(const void* start, size_t bytes);
void unshare();
void begin_turns(u_int64_t blocks, unsigned int threads);
// A thread reads what blocks share, but not by a load of its own.
void read_shared_sums(const void* place, size_t bytes);
// A thread has waited for a turn, or ends it.
void acquire(const unsigned int* counter);
void release(const unsigned int* counter);
#ifndef SHIM_CHECKED
inline Shadow* new_shadow(size_t) { return nullptr; }
inline void share(const void*, size_t) {}
inline void unshare() {}
inline void begin_turns(u_int64_t, unsigned int) {}
inline void read_shared_sums(const void*, size_t) {}
inline void acquire(const unsigned int*) {}
inline void release(const unsigned int*) {}
#endif
// Records an access of a thread to shared memory that is not a load or store of its own.
void access_shared(unsigned int thread, const void* place, size_t bytes, bool writes);
#ifndef SHIM_CHECKED
inline void access_shared(unsigned int, const void*, size_t, bool) {}
#endif
// Whether accesses are of the shim itself, and do not count.
inline thread_local bool is_internal = false;
// Counts an access by an instruction, which is any address that is the instruction's alone.
void count_access(const void* place, size_t bytes, const void* instruction, bool is_matrix);
#ifndef SHIM_COUNTED
inline void count_access(const void*, size_t, const void*, bool) {}
#endif
// A thread comes by an instruction that others of its warp access memory by.
void pass_access(const void* instruction);
// Counts bytes of a buffer that TMA reads or writes, and what is there of each row of a box.
void count_bytes(const void* place, size_t bytes);
void count_box(const TensorMap& map, const int* first);
#ifndef SHIM_COUNTED
inline void pass_access(const void*) {}
inline void count_bytes(const void*, size_t) {}
inline void count_box(const TensorMap&, const int*) {}
#endif
// While it is there accesses do not count. Hooks come after what a compiler leaves out, to which the
// flag must look as if accesses read it.
struct Uncounted {
  bool before = is_internal;
  Uncounted() { is_internal = true; asm volatile("" ::: "memory"); }
  ~Uncounted() { asm volatile("" ::: "memory"); is_internal = before; }
};

extern "C" void shim_switch(void** from, void* to);
#if defined(__x86_64__)
asm(".text\n.weak shim_switch\nshim_switch:\n"
    " pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
    " movq %rsp,(%rdi)\n movq %rsi,%rsp\n"
    " popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n ret\n");
#else
#error "fibers are written for x86-64"
#endif

// Reports a finding, if it is the first one.
template <class... A> inline void find(const char* format, A... of) {
  if (!report[0]) snprintf(report, sizeof report, format, of...);
}

// The next random number of the order of threads and copies, or zero where they keep their order.
inline u_int64_t draw() {
  Block& b = block;
  b.random = b.random * 6364136223846793005ULL + 1442695040888963407ULL * (b.random != 0);
  return b.random >> 33;
}

// Ends one of the copies that are under way.
inline void land() {
  Block& b = block;
  size_t at = draw() % b.copies.size();
  TmaLoad copy = std::move(b.copies[at]);
  b.copies.erase(b.copies.begin() + at);
  copy.run();
}

// Where no thread is ready a copy ends, or one that sleeps wakes up; says whether there is one.
inline bool stir() {
  Block& b = block;
  size_t all = b.copies.size() + b.asleep.size();
  if (!all && b.slow.empty()) return false;
  size_t at = draw() % (all ? all : b.slow.size());
  if (at < b.copies.size()) { land(); return true; }
  std::vector<Fiber*>& of = all ? b.asleep : b.slow;
  at -= all ? b.copies.size() : 0;
  b.ready.push_back(of[at]);
  of.erase(of.begin() + at);
  return true;
}

// Switches to the next fiber that is ready, or back to the launch.
inline void next() {
  Block& b = block;
  Fiber* from = b.current;
  while (b.head == b.ready.size() && stir()) {}
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

// Where threads arrive or have waited, in the orders of half of the seeds: copies may end there,
// others go on first, or all others do as long as they can. In the other orders copies are as late
// as they may be.
inline void interleave() {
  Block& b = block;
  if (!b.interleaves) return;
  u_int64_t choice = draw();
  if (choice & 4 && !b.copies.empty()) land();
  if ((size_t)(b.current - b.fibers.data()) / 32 == b.slow_warp) b.slow.push_back(b.current);
  else if ((choice & 3) != 3) return;
  else if (choice & 24) b.ready.push_back(b.current);
  else b.asleep.push_back(b.current);
  next();
}

// The same before a fence, in orders in which no warp is slow: what a thread has written may be
// fenced long after a barrier that comes between.
inline void interleave_fence() {
  if (block.slow_warp >= block.warps.size()) interleave();
}

// Another block goes on first.
inline void pause() {
  Fiber* me = block.current;
  block.ready.push_back(me);
  shim_switch(&me->stack_pointer, block.caller);
}
// The same in some orders, where there are several.
inline void pause_at_times() {
  if (residents > 1 && draw() % 4 == 1) pause();
}

inline void begin() {
  body();
  block.current->is_done = true;
  block.alive -= 1;
  next();
  abort();
}

inline void barrier_wait(Barrier& barrier, size_t count, const char* place) {
  Block& b = block;
  Fiber* me = b.current;
  if (barrier.waiting.size() + 1 < count) {
    barrier.waiting.push_back(me);
    me->waits = place;
    next();
    me->waits = nullptr;
    return;
  }
  for (Fiber* other : barrier.waiting) b.ready.push_back(other);
  barrier.waiting.clear();
}

inline unsigned int lane() { return (unsigned int)(block.current - block.fibers.data()); }

void check_registers();

inline void* shared_array(const char* name, size_t before, size_t bytes) {
  Block& b = block;
  for (size_t at = 0; at < b.array_count; at++) {
    if (!strcmp(b.arrays[at].name, name)) return b.arrays[at].start + before;
  }
  if (b.array_count == ARRAYS) abort();
  auto fits = [&](const SharedArray& of) {
    return of.before == before && of.bytes == bytes && !strcmp(of.name, name);
  };
  auto left = std::find_if(arrays_left.begin(), arrays_left.end(), fits);
  SharedArray& own = b.arrays[b.array_count++];
  if (left != arrays_left.end()) {
    own = *left;
    arrays_left.erase(left);
  } else {
    size_t all = (2 * before + bytes + 127) / 128 * 128;
    own = SharedArray{name, (unsigned char*)aligned_alloc(128, all), before, bytes, nullptr};
    if (!own.start) abort();
  }
  // What is left may be of a library without checks.
  if (!own.shadow) own.shadow = new_shadow(bytes);
  memset(own.start, 0xff, 2 * before + bytes);
  if (cluster_blocks > 1) {
    clusters[b.index.x / cluster_blocks].arrays[{b.index.x % cluster_blocks, name}] = own;
  }
  return own.start + before;
}

// Begins a block: its threads are ready, in an order of the seed.
inline void begin_block(unsigned int number, unsigned int threads, u_int64_t seed) {
  block = Block{};
  Block& b = block;
  b.index = Index{number, 0, 0};
  b.serial = serial_last += 1;
  while (stacks.size() < threads) {
    void* room = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (room == MAP_FAILED) { fprintf(stderr, "no room for the stacks of a block\n"); abort(); }
    stacks.push_back((char*)room);
  }
  b.stacks.assign(stacks.end() - threads, stacks.end());
  stacks.resize(stacks.size() - threads);
  b.fibers.assign(threads, Fiber{});
  b.warps.assign((threads + 31) / 32, Barrier{});
  b.shown.assign(threads, nullptr);
  b.warpgroups.assign((threads + 127) / 128, Warpgroup{});
  b.random = seed;
  b.interleaves = seed & 4;
  // Of seeds that follow each other the slow warps are far apart: of three warpgroups one of each,
  // and then none, so that each role is slow in some order, however few these are.
  if (b.interleaves) b.slow_warp = 5 * (seed / 8 * 4 + seed % 4) % (2 * b.warps.size());
  b.alive = threads;
  for (unsigned int i = 0; i < threads; i++) {
    Fiber& fiber = b.fibers[i];
    fiber.index = Index{i, 0, 0};
    void** top = (void**)(b.stacks[i] + STACK) - 1;
    *--top = (void*)begin;
    for (int saved = 0; saved < 6; saved++) *--top = nullptr;
    fiber.stack_pointer = top;
    b.ready.push_back(&fiber);
  }
  for (unsigned int i = threads; seed && i > 1; i--) {
    seed = seed * 6364136223846793005ULL + 1442695040888963407ULL;
    std::swap(b.ready[i - 1], b.ready[(seed >> 33) % i]);
  }
}

// Runs the block until it pauses, or until none of its threads can go on.
inline void go_on() {
  Block& b = block;
  std::vector<TurnWait> later;
  for (const TurnWait& wait : b.turns) {
    if (*wait.counter == wait.turn) b.ready.push_back(wait.fiber);
    else later.push_back(wait);
  }
  b.turns.swap(later);
  block_index = b.index;
  serial = b.serial;
  b.current = b.ready[b.head++];
  thread_index = b.current->index;
  running = &b;
  shim_switch(&b.caller, b.current->stack_pointer);
  running = nullptr;
}

inline bool can_go_on(const Block& b) {
  auto has_come = [](const TurnWait& wait) { return *wait.counter == wait.turn; };
  return b.head < b.ready.size() || std::any_of(b.turns.begin(), b.turns.end(), has_come);
}

// Ends a block: what it had is used again.
inline void end_block() {
  Block& b = block;
  stacks.insert(stacks.end(), b.stacks.begin(), b.stacks.end());
  arrays_left.insert(arrays_left.end(), b.arrays, b.arrays + b.array_count);
  b.array_count = 0;
}

// Looks at a block that has run to its end, or to a deadlock.
inline void check_block() {
  Block& b = block;
  // Where threads wait for copies too a deadlock is reported, as tests cause some.
  check_registers();
  for (Fiber& fiber : b.fibers) {
    if (!fiber.stores.empty()) find("thread %u ends before its stores are done", fiber.index.x);
  }
  for (auto& [place, of] : b.mbarriers) {
    if (!b.alive && of.pending != of.arrivals) find("an mbarrier has %ld arrivals in a phase that does not end", of.arrivals - of.pending);
  }
  if (b.alive && !b.mbarriers.empty()) {
    find("%zu threads of block %u are in a deadlock", b.alive, block_index.x);
    return;
  }
  if (b.alive) {
    fprintf(stderr, "deadlock in block %u:", block_index.x);
    for (Fiber& fiber : b.fibers) {
      if (fiber.waits) fprintf(stderr, " thread %u waits at %s;", fiber.index.x, fiber.waits);
    }
    fprintf(stderr, " %zu threads are not done\n", b.alive);
    abort();
  }
}

// Some of as many as the first seeds have one of, or few.
inline u_int64_t resident(u_int64_t all, u_int64_t seed) { return std::min<u_int64_t>(all, 1 + seed % 4); }

// Runs the blocks of a grid, which start in their order, each when there is room for it.
inline void run_blocks(u_int64_t blocks, unsigned int threads, u_int64_t seed) {
  std::vector<Block> there;
  u_int64_t begun = 0, random = seed;
  while (begun < blocks || !there.empty()) {
    for (; there.size() < residents && begun < blocks; begun++) {
      begin_block((unsigned int)begun, threads, seed ? seed + begun : 0);
      there.push_back(std::move(block));
    }
    random = random * 6364136223846793005ULL + 1442695040888963407ULL * (random != 0);
    auto may = [](const Block& of) { return !of.is_held && can_go_on(of); };
    size_t at = 0, first = (random >> 33) % there.size();
    while (at < there.size() && !may(there[(first + at) % there.size()])) at++;
    if (at == there.size()) {
      bool was_held = false;
      for (Block& of : there) {
        was_held |= of.is_held;
        of.is_held = false;
      }
      if (was_held) continue;
      find("block %u waits for turn %u, which does not come", there[0].index.x, there[0].turns[0].turn);
      for (Block& lost : there) { block = std::move(lost); end_block(); }
      return;
    }
    at = (first + at) % there.size();
    block = std::move(there[at]);
    go_on();
    if (can_go_on(block) || !block.turns.empty()) {
      there[at] = std::move(block);
      continue;
    }
    check_block();
    end_block();
    there.erase(there.begin() + at);
  }
}

// Runs a function on a grid.
template <class F> void launch(u_int64_t blocks, unsigned int threads, bool synchronizes, u_int64_t seed, F f) {
  block_size = Index{threads, 1, 1};
  grid_size = Index{(unsigned int)blocks, 1, 1};
  if (synchronizes) {
    body = f;
    run_blocks(blocks, threads, seed);
    return;
  }
  for (u_int64_t at = 0; at < blocks; at++) {
    block_index = Index{(unsigned int)at, 0, 0};
    serial = serial_last += 1;
    for (unsigned int i = 0; i < threads; i++) {
      thread_index = Index{seed & 1 ? threads - 1 - i : i, 0, 0};
      f();
    }
  }
}

// The same, of whose blocks some are there at a time.
template <class F>
void launch_together(u_int64_t blocks, u_int64_t at_once, unsigned int threads, u_int64_t seed, F f) {
  residents = at_once;
  begin_turns(blocks, threads);
  launch(blocks, threads, true, seed, f);
  unshare();
  residents = 1;
  // The next launch finds them as this one has.
  Uncounted here;
  for (const unsigned int* counter : ticketed) {
    if (*counter) find("of a counter %u tickets are left", *counter);
  }
  ticketed.clear();
}

// The same, where blocks take turns: of the blocks some are there at a time.
template <class F> void launch_turns(u_int64_t blocks, unsigned int threads, u_int64_t seed, F f) {
  launch_together(blocks, resident(blocks, seed), threads, seed, f);
}

// The same of tickets, which are taken by blocks that are far apart.
template <class F> void launch_tickets(u_int64_t blocks, unsigned int threads, u_int64_t seed, F f) {
  launch_together(blocks, std::min<u_int64_t>(blocks, 1 + seed % 2 * 15), threads, seed, f);
}

// The same of clusters: all blocks of one are there at a time.
template <class F>
void launch_clusters(u_int64_t blocks, unsigned int threads, unsigned int cluster, u_int64_t seed, F f) {
  cluster_blocks = cluster;
  residents = cluster * (1 + seed % 2);
  clusters.clear();
  launch(blocks, threads, true, seed, f);
  clusters.clear();
  residents = cluster_blocks = 1;
}

}  // namespace shim

// The first finding since the last call, or nothing.
extern "C" const char* shim_report() {
  static thread_local char told[sizeof shim::report];
  memcpy(told, shim::report, sizeof told);
  shim::report[0] = 0;
  return told;
}

#define threadIdx shim::thread_index
#define blockIdx shim::block_index
#define blockDim shim::block_size
#define gridDim shim::grid_size

// Launches follow each other.
inline void griddep_launch() {}
inline void griddep_wait() {}
inline void sync_block() {
  shim::pause_at_times();
  shim::barrier_wait(shim::block.all, shim::block.fibers.size(), "sync_block");
  shim::block.current->blocks += 1;
  shim::block.current->meetings += 1;
}
namespace shim {
// Meets other threads, and learns whether one of them says so.
template <class F> bool meet_and_vote(unsigned int barrier, bool says, F meet) {
  size_t at = block.current->votes++;
  std::deque<bool>& votes = block.votes[barrier];
  if (votes.size() <= at) votes.resize(at + 1);
  if (says) votes[at] = true;
  meet();
  return block.votes[barrier][at];
}
}  // namespace shim
inline bool sync_block_or(bool says) { return shim::meet_and_vote(0, says, sync_block); }
namespace shim {
inline void sync_lanes(const char* place) {
  size_t warp = lane() / 32, all = block.fibers.size();
  size_t members = all - 32 * warp < 32 ? all - 32 * warp : 32;
  barrier_wait(block.warps[warp], members, place);
}
// Goes on with other threads, and other blocks, until a counter is a number.
inline void wait_for(const unsigned int* counter, unsigned int turn) {
  while (*counter != turn) {
    block.turns.push_back(TurnWait{counter, turn, block.current});
    block.current->waits = "wait_for_turn";
    next();
    block.current->waits = nullptr;
  }
}
}  // namespace shim
inline void wait_for_turn(const unsigned int* counter, unsigned int turn) {
  shim::wait_for(counter, turn);
  shim::acquire(counter);
  shim::block.current->has_waited = true;
}
inline bool take_ticket(unsigned int* counter, unsigned int tickets) {
  static const char instruction = 0;
  shim::count_access(counter, sizeof *counter, &instruction, false);
  shim::acquire(counter);
  shim::release(counter);
  bool is_last;
  {
    shim::Uncounted here;
    shim::ticketed.insert(counter);
    is_last = *counter == tickets - 1;
    *counter = *counter >= tickets - 1 ? 0 : *counter + 1;
  }
  // Blocks of later tickets go on before others of this one do.
  if (shim::residents > 1 && shim::draw() % 2) {
    shim::block.is_held = true;
    shim::pause();
  }
  return is_last;
}
inline void end_turn(unsigned int* counter, unsigned int next) {
  if (shim::block.current->has_stored) shim::find("thread %u ends a turn before a fence", threadIdx.x);
  shim::release(counter);
  *counter = next;
  shim::pause_at_times();
}
namespace shim {
// Records that a thread of another block has stored some bytes, once all have met.
void land_store(const SharedArray& array, size_t at, size_t bytes, u_int64_t block, const unsigned int passed[2]);
#ifndef SHIM_CHECKED
inline void land_store(const SharedArray&, size_t, size_t, u_int64_t, const unsigned int[2]) {}
#endif
// All threads of a cluster have come: they see what was stored to the memory of their blocks.
inline void land_stores(Cluster& cluster) {
  Uncounted here;
  for (const ClusterStore& store : cluster.stores) {
    auto found = cluster.arrays.find({store.rank, store.array});
    if (found == cluster.arrays.end()) abort();
    const SharedArray& array = found->second;
    unsigned int passed[2] = {cluster.passed[store.rank], cluster.now[store.rank]};
    land_store(array, store.at, store.value.size(), cluster.serials[store.rank], passed);
    memcpy(array.start + array.before + store.at, store.value.data(), store.value.size());
  }
  cluster.stores.clear();
  for (size_t rank = 0; rank < cluster.now.size(); rank++) cluster.passed[rank] = cluster.now[rank] + 1;
}
}  // namespace shim
inline void sync_cluster() {
  shim::Fiber& me = *shim::block.current;
  unsigned int number = shim::block.index.x / shim::cluster_blocks, rank = shim::block.index.x % shim::cluster_blocks;
  shim::Cluster& cluster = shim::clusters[number];
  cluster.now.resize(shim::cluster_blocks);
  cluster.passed.resize(shim::cluster_blocks);
  cluster.serials.resize(shim::cluster_blocks);
  cluster.now[rank] = me.blocks;
  cluster.serials[rank] = shim::block.serial;
  while (cluster.arrived.size() <= me.clusters) cluster.arrived.push_back(0);
  unsigned int& arrived = cluster.arrived[me.clusters];
  unsigned int all = (unsigned int)shim::block.fibers.size() * shim::cluster_blocks;
  arrived += 1;
  if (arrived == all) {
    shim::land_stores(cluster);
    // The others of its block go on before another block does.
    auto& waiting = shim::block.turns;
    for (const shim::TurnWait& wait : waiting) {
      if (wait.counter == &arrived) shim::block.ready.push_back(wait.fiber);
    }
    auto is_over = [&](const shim::TurnWait& wait) { return wait.counter == &arrived; };
    waiting.erase(std::remove_if(waiting.begin(), waiting.end(), is_over), waiting.end());
  } else {
    shim::wait_for(&arrived, all);
  }
  me.clusters += 1;
  me.blocks += 1;
  me.meetings += 1;
}
template <class T> void store_in_cluster(T* place, unsigned int rank, T value) {
  unsigned int number = shim::block.index.x / shim::cluster_blocks;
  shim::Cluster& cluster = shim::clusters[number];
  if (!shim::block.current->clusters) {
    shim::find("thread %u stores to a block that may not have begun", threadIdx.x);
    return;
  }
  for (size_t at = 0; at < shim::block.array_count; at++) {
    const shim::SharedArray& array = shim::block.arrays[at];
    size_t offset = (size_t)((unsigned char*)place - array.start) - array.before;
    if (offset >= array.bytes || rank >= shim::cluster_blocks) continue;
    const unsigned char* bytes = (const unsigned char*)&value;
    cluster.stores.push_back(shim::ClusterStore{rank, array.name, offset, std::vector<unsigned char>(bytes, bytes + sizeof value)});
    return;
  }
  shim::find("thread %u stores beyond the shared memory of its cluster", threadIdx.x);
}
inline void sync_warp() {
  shim::sync_lanes("sync_warp");
  shim::block.current->warps += 1;
  shim::block.current->meetings += 1;
}
// A shuffle does not order accesses to memory.
template <class T> T shuffle(T x, int lane) {
  unsigned int me = shim::lane();
  shim::block.shown[me] = &x;
  shim::sync_lanes("shuffle");
  T found = *(const T*)shim::block.shown[me / 32 * 32 + (unsigned int)lane];
  shim::sync_lanes("shuffle");
  return found;
}
inline unsigned int ballot(bool holds) {
  unsigned int me = shim::lane(), mask = 0;
  shim::block.shown[me] = &holds;
  shim::sync_lanes("ballot");
  for (unsigned int lane = 0; lane < 32; lane++) {
    mask |= (unsigned int)*(const bool*)shim::block.shown[me / 32 * 32 + lane] << lane;
  }
  shim::sync_lanes("ballot");
  return mask;
}
inline unsigned int bits_set(unsigned int x) { return (unsigned int)__builtin_popcount(x); }
template <class T> T shuffle_xor(T x, int bits) { return shuffle(x, (int)(shim::lane() % 32) ^ bits); }

template <class T, int N> struct Vector;
namespace shim {
template <class W> void need_aligned(const void* place) {
  if ((uintptr_t)place % sizeof(W) == 0) return;
  fprintf(stderr, "thread %u of block %u accesses %zu bytes that are not aligned\n", thread_index.x,
          block_index.x, sizeof(W));
  abort();
}
}  // namespace shim
// At each place that they are called from they are instructions of its own.
#define ONE_PLACE inline __attribute__((always_inline))
template <class T, int N> ONE_PLACE Vector<T, N> load_vector(const T* from) {
  Vector<T, N> x;
  shim::need_aligned<Vector<T, N>>(from);
  memcpy((void*)&x, from, sizeof x);
  return x;
}
template <class T, int N> ONE_PLACE void store_vector(T* to, const Vector<T, N>& x) {
  shim::need_aligned<Vector<T, N>>(to);
  memcpy((void*)to, &x, sizeof x);
}

// ---- asynchronous copies to shared memory

template <int BYTES> void cp_async(void* to, const void* from, bool is_there) {
  shim::Fiber& me = *shim::block.current;
  if ((uintptr_t)to % BYTES || (uintptr_t)from % BYTES) {
    fprintf(stderr, "thread %u copies %d bytes to or from where they are not aligned\n",
            me.index.x, BYTES);
    abort();
  }
  static const char instructions[2] = {};
  if (is_there) shim::read_shared_sums(from, BYTES);
  if (is_there) shim::count_access(from, BYTES, instructions, false);
  else shim::pass_access(instructions);
  shim::count_access(to, BYTES, instructions + 1, false);
  // The bytes may be written at any time until the copy is waited for.
  shim::access_shared(me.index.x, to, BYTES, true);
  me.copies.push_back(shim::Copy{to, is_there ? from : nullptr, BYTES, me.group});
}
inline void cp_async_commit() { shim::block.current->group += 1; }
template <int LAST> void cp_async_wait() {
  shim::Fiber& me = *shim::block.current;
  std::vector<shim::Copy> later;
  for (const shim::Copy& copy : me.copies) {
    if (copy.group + LAST >= me.group) {
      later.push_back(copy);
      continue;
    }
    shim::access_shared(me.index.x, copy.to, copy.bytes, true);
    if (copy.from) {
      memcpy(copy.to, copy.from, copy.bytes);
    } else {
      memset(copy.to, 0, copy.bytes);
    }
  }
  me.copies.swap(later);
}

// ---- tensor cores

namespace shim {

// Runs an instruction of the warp: the last lane to arrive works for all.
template <class P, class F> void warp_collective(P mine, F f) {
  unsigned int me = lane();
  block.shown[me] = &mine;
  size_t warp = me / 32;
  // The last lane to arrive goes on first, before any other has left the barrier.
  bool is_last = block.warps[warp].waiting.size() + 1 == 32;
  if (is_last) {
    P* all[32];
    for (size_t i = 0; i < 32; i++) all[i] = (P*)block.shown[warp * 32 + i];
    Uncounted here;
    f(all);
  }
  barrier_wait(block.warps[warp], 32, "an instruction of the warp");
}

struct Matrices { unsigned int* x; const unsigned char* row; };

inline void load(unsigned int* x, const void* row, bool turns) {
  if ((uintptr_t)row % 16) {
    fprintf(stderr, "thread %u names a row that is not aligned\n", block.current->index.x);
    abort();
  }
  access_shared(block.current->index.x, row, 16, false);
  static const char instruction = 0;
  count_access(row, 16, &instruction, true);
  warp_collective(Matrices{x, (const unsigned char*)row}, [turns](Matrices** all) {
    for (int matrix = 0; matrix < 4; matrix++) {
      for (int lane = 0; lane < 32; lane++) {
        u_int16_t two[2];
        for (int h = 0; h < 2; h++) {
          int row = turns ? lane % 4 * 2 + h : lane / 4, col = turns ? lane / 4 : lane % 4 * 2 + h;
          memcpy(&two[h], all[matrix * 8 + row]->row + 2 * col, 2);
        }
        memcpy(&all[lane]->x[matrix], two, 4);
      }
    }
  });
}

}  // namespace shim

inline void ldmatrix(unsigned int (&x)[4], const void* row) { shim::load(x, row, false); }
inline void ldmatrix_trans(unsigned int (&x)[4], const void* row) { shim::load(x, row, true); }

struct bf16;
struct f16;
inline float widened(bf16 x);
inline float widened(f16 x);

template <class T> struct Store;
// Two elements of a register, rounded.
template <class T> unsigned int packed(float low, float high) {
  return Store<T>::of(low).bits | (unsigned int)Store<T>::of(high).bits << 16;
}
inline float ex2_approx(float x) { return exp2f(x); }
inline float rcp_approx(float x) { return 1.0f / x; }

// An element of a register of two.
template <class T> float half_of(unsigned int two, int h) {
  unsigned short bits = (unsigned short)(two >> 16 * h);
  T x;
  memcpy((void*)&x, &bits, 2);
  return widened(x);
}
struct tf32;
struct f8e4m3;
struct f8e5m2;
inline float widened(f8e4m3 x);
inline float widened(f8e5m2 x);
// Elements of a register, and each of them.
template <class T> struct Register {
  static const int COUNT = 2;
  static float at(unsigned int bits, int e) { return half_of<T>(bits, e); }
};
template <> struct Register<tf32> {
  static const int COUNT = 1;
  // Tensor cores read no more than 10 bits of the mantissa.
  static float at(unsigned int bits, int) { return float_of_bits(bits & ~0x1fffu); }
};
namespace shim {
template <class T> struct RegisterOfBytes {
  static const int COUNT = 4;
  template <class U = T> static float at(unsigned int bits, int e) {
    unsigned char byte = (unsigned char)(bits >> 8 * e);
    U x;
    memcpy((void*)&x, &byte, 1);
    return widened(x);
  }
};
}  // namespace shim
template <> struct Register<f8e4m3> : shim::RegisterOfBytes<f8e4m3> {};
template <> struct Register<f8e5m2> : shim::RegisterOfBytes<f8e5m2> {};
inline void round_to_tf32(unsigned int& x) {
  if ((x & 0x7f800000u) != 0x7f800000u) x += 0x1000;
  x &= ~0x1fffu;
}

template <class A, class B = A, int M, int N>
void warp_mma(float (&c)[M][N][4], const unsigned int (&a)[M][4],
                   const unsigned int (&b)[N / 2][4]) {
  struct Mine { float (*c)[N][4]; const unsigned int (*a)[4]; const unsigned int (*b)[4]; };
  shim::warp_collective(Mine{c, a, b}, [](Mine** all) {
    // Elements of a register, and of a step along k, which has eight of them.
    const int E = Register<A>::COUNT, K = 8 * E;
    static thread_local float x[M * 16][K], y[K][N * 8], z[M * 16][N * 8];
    for (int lane = 0; lane < 32; lane++) {
      const Mine& of = *all[lane];
      int row = lane / 4, col = lane % 4 * 2, k = lane % 4 * E;
      for (int i = 0; i < M; i++) {
        for (int r = 0; r < 4; r++) {
          for (int e = 0; e < E; e++) {
            x[i * 16 + row + r % 2 * 8][k + r / 2 * 4 * E + e] = Register<A>::at(of.a[i][r], e);
          }
        }
      }
      for (int j = 0; j < N; j++) {
        for (int r = 0; r < 2; r++) {
          for (int e = 0; e < E; e++) {
            y[k + r * 4 * E + e][j * 8 + row] = Register<B>::at(of.b[j / 2][j % 2 * 2 + r], e);
          }
        }
      }
      for (int i = 0; i < M; i++) {
        for (int j = 0; j < N; j++) {
          for (int q = 0; q < 4; q++) z[i * 16 + row + q / 2 * 8][j * 8 + col + q % 2] = of.c[i][j][q];
        }
      }
    }
    for (int i = 0; i < M * 16; i++) {
      for (int k = 0; k < K; k++) {
        for (int j = 0; j < N * 8; j++) z[i][j] += x[i][k] * y[k][j];
      }
    }
    for (int lane = 0; lane < 32; lane++) {
      int row = lane / 4, col = lane % 4 * 2;
      for (int i = 0; i < M; i++) {
        for (int j = 0; j < N; j++) {
          for (int q = 0; q < 4; q++) {
            all[lane]->c[i][j][q] = z[i * 16 + row + q / 2 * 8][j * 8 + col + q % 2];
          }
        }
      }
    }
  });
}

// ---- sm_90a: copies by TMA, mbarriers, and tensor cores of warpgroups
//
// The worst that the machine may do: copies land when no thread can go on, or where one arrives at a
// barrier; products read shared memory when they are waited for. What is written between that and
// their issue, by threads or by copies, is reported.

#define TENSOR_MAP const TensorMap&
#define DYNAMIC_SHARED(NAME, BYTES) unsigned char* NAME = shim::dynamic_shared(BYTES)

// A tensor as its map describes it: dims, strides in bytes from the second on, the box, and bytes of
// an element.
struct TensorMap {
  const void* base;
  int count;
  u_int64_t dims[5], strides[4];
  unsigned int box[5];
  unsigned int element;
};

namespace shim {

// Registers of a multiprocessor.
const unsigned int REGISTERS = 65536;

inline unsigned char* dynamic_shared(size_t bytes) {
  if (!block.dynamic) {
    block.room.assign(bytes + 1024, 0xff);
    block.dynamic = (unsigned char*)(((uintptr_t)block.room.data() + 1023) / 1024 * 1024);
    block.dynamic_bytes = bytes;
  }
  return block.dynamic;
}

// Bytes of dynamic shared memory, or of nowhere.
inline unsigned char* shared_bytes(size_t at, size_t bytes) {
  static thread_local unsigned char nowhere[256];
  if (at + bytes <= block.dynamic_bytes) return block.dynamic + at;
  find("thread %u accesses byte %zu of %zu in shared memory", thread_index.x, at, block.dynamic_bytes);
  return nowhere;
}

// The place of a byte by the swizzle of 128 bytes: bits 4 to 6 by those from bit 7 on.
inline size_t swizzled(size_t at) { return at ^ (at >> 7 & 7) << 4; }

inline Mbarrier& known(const void* at) {
  Mbarrier& barrier = block.mbarriers[at];
  if (!barrier.arrivals) find("thread %u uses an mbarrier that is not initialised", thread_index.x);
  return barrier;
}

inline void end_phase(Mbarrier& barrier) {
  if (barrier.pending || barrier.bytes) return;
  barrier.parity ^= 1;
  barrier.pending = barrier.arrivals;
  for (Fiber* fiber : barrier.waiting) block.ready.push_back(fiber);
  barrier.waiting.clear();
}

inline void arrive(Mbarrier& barrier, long bytes) {
  if (!barrier.pending) find("thread %u arrives once too often", thread_index.x);
  barrier.bytes += bytes;
  barrier.pending -= 1;
  end_phase(barrier);
}

// Calls a function for each element of a box, in order: its byte of the box without the swizzle,
// whether it is there, and its byte of the tensor.
template <class F> void each_of_box(const TensorMap& map, const int* first, F f) {
  size_t count = 1;
  for (int d = 0; d < map.count; d++) count *= map.box[d];
  for (size_t i = 0; i < count; i++) {
    size_t rest = i, offset = 0;
    bool is_there = true;
    for (int d = 0; d < map.count; d++) {
      int64_t x = (int64_t)(rest % map.box[d]) + first[d];
      rest /= map.box[d];
      is_there = is_there && x >= 0 && x < (int64_t)map.dims[d];
      offset += (size_t)x * (d ? map.strides[d - 1] : map.element);
    }
    f(i * map.element, is_there, offset);
  }
}

// The bytes of a box, which starts at a byte of shared memory; what is wrong with it is reported.
inline size_t checked_box(size_t start, const TensorMap& map, int coordinates) {
  size_t bytes = map.element;
  if (coordinates != map.count) { find("a copy has %d coordinates, its map %d", coordinates, map.count); return 0; }
  for (int d = 0; d < map.count; d++) bytes *= map.box[d];
  if (start % 1024 || map.box[0] * map.element != 128) find("a copy is not aligned to its swizzle");
  if ((uintptr_t)map.base % 16) find("a tensor is not aligned to 16 bytes");
  for (int d = 0; d + 1 < map.count; d++) {
    if (map.strides[d] % 16) find("a stride of a tensor map is not one of 16 bytes");
  }
  return bytes;
}

// Reports what products that are under way may still read of some bytes that are written.
inline void check_not_read(size_t start, size_t bytes) {
  for (const Warpgroup& of : block.warpgroups) {
    for (const Multiplication& read : of.pending) {
      for (auto [from, end] : read.reads) {
        if (from < start + bytes && start < end) find("a copy overwrites what a product reads");
      }
    }
  }
}

// Reports what a product reads, from now until it is waited for, and a copy has yet to write; and
// what a thread has written and not fenced, as TMA reads.
inline void check_reads(const std::vector<std::pair<size_t, size_t>>& reads) {
  for (const TmaLoad& copy : block.copies) {
    for (auto [from, end] : reads) {
      if (copy.start < end && from < copy.start + copy.bytes) find("a product reads what is being copied");
    }
  }
  for (const Fiber& fiber : block.fibers) {
    for (auto [low, high] : fiber.unfenced) {
      for (auto [from, end] : reads) {
        if (low < end && from < high) find("a product reads what thread %u wrote, which is not fenced", fiber.index.x);
      }
    }
  }
}

inline void load_box(void* to, const TensorMap& map, const void* place, const int* coordinates, int count) {
  Mbarrier& barrier = known(place);
  if (!barrier.is_known) find("an mbarrier is not fenced when a copy uses it");
  size_t start = (unsigned char*)to - block.dynamic, bytes = checked_box(start, map, count);
  if (!bytes) return;
  check_not_read(start, bytes);
  count_box(map, coordinates);
  // Before the copy ends its bytes are anything.
  memset(shared_bytes(start, bytes), 0xff, start + bytes <= block.dynamic_bytes ? bytes : 0);
  std::vector<int> first(coordinates, coordinates + count);
  TensorMap copied = map;
  auto run = [=] {
    each_of_box(copied, first.data(), [&](size_t byte, bool is_there, size_t offset) {
      unsigned char* at = shared_bytes(swizzled(start + byte), copied.element);
      if (is_there) memcpy(at, (const unsigned char*)copied.base + offset, copied.element);
      else memset(at, 0, copied.element);
    });
    Mbarrier& barrier = block.mbarriers[place];
    barrier.bytes -= (long)bytes;
    if (barrier.bytes < 0) find("more bytes are copied than an mbarrier expects");
    end_phase(barrier);
  };
  block.copies.push_back(TmaLoad{start, bytes, run});
}

// Reports what a thread has written and not fenced of what TMA reads.
inline void check_fenced(size_t start, size_t bytes) {
  for (const Fiber& fiber : block.fibers) {
    for (auto [low, end] : fiber.unfenced) {
      if (low < start + bytes && start < end) find("TMA stores what thread %u wrote, which is not fenced", fiber.index.x);
    }
  }
}

// Stores what a box holds now; what it holds when the store is waited for must be the same, since
// it may be read at any time until then.
inline void store_box(const void* from, const TensorMap& map, const int* first, int count) {
  size_t start = (const unsigned char*)from - block.dynamic, bytes = checked_box(start, map, count);
  if (!bytes || start + bytes > block.dynamic_bytes) { find("a store is not in shared memory"); return; }
  check_fenced(start, bytes);
  count_box(map, first);
  each_of_box(map, first, [&](size_t byte, bool is_there, size_t offset) {
    const unsigned char* at = shared_bytes(swizzled(start + byte), map.element);
    if (is_there) memcpy((unsigned char*)map.base + offset, at, map.element);
  });
  const unsigned char* held = block.dynamic + start;
  block.current->stores.push_back(TmaStore{start, std::vector<unsigned char>(held, held + bytes), false, false, nullptr});
}

// Stores numbers, or adds them, when that is waited for.
inline void store_numbers(float* to, const void* from, size_t bytes, bool adds) {
  Fiber& me = *block.current;
  size_t start = (const unsigned char*)from - block.dynamic;
  if ((start | (uintptr_t)to | bytes) % 16) find("a store is not of whole vectors");
  if (start + bytes > block.dynamic_bytes) { find("a store is not in shared memory"); return; }
  if (me.has_waited) find("thread %u has TMA write before a fence", me.index.x);
  check_fenced(start, bytes);
  count_bytes(to, bytes);
  const unsigned char* held = block.dynamic + start;
  std::vector<unsigned char> copied(held, held + bytes);
  auto end = [=] {
    Uncounted here;
    for (size_t i = 0; i < bytes / 4; i++) {
      float x;
      memcpy(&x, copied.data() + 4 * i, 4);
      to[i] = adds ? to[i] + x : x;
    }
    block.current->has_stored = true;
  };
  me.stores.push_back(TmaStore{start, copied, false, false, end});
}

// Waits until what is stored has been read, or until it is there too.
inline void wait_for_stores(bool until_end) {
  std::vector<TmaStore> later, all;
  all.swap(block.current->stores);
  for (TmaStore& store : all) {
    if (!store.is_committed) { later.push_back(store); continue; }
    if (!store.is_read && memcmp(store.held.data(), block.dynamic + store.start, store.held.size())) {
      find("shared memory is written before a store has read it");
    }
    store.is_read = true;
    if (!store.end) continue;
    if (until_end) store.end();
    else later.push_back(store);
  }
  block.current->stores.swap(later);
}

inline Warpgroup& warpgroup() { return block.warpgroups[lane() / 128]; }

// Runs an instruction of the warpgroup: the last thread to arrive works for all.
template <class F> void warpgroup_collective(const void* mine, F f) {
  block.shown[lane()] = mine;
  if (warpgroup().barrier.waiting.size() + 1 == 128) f();
  barrier_wait(warpgroup().barrier, 128, "an instruction of the warpgroup");
  block.current->meetings += 1;
}

inline void set_registers(unsigned int count, bool more) {
  Warpgroup& of = warpgroup();
  if (count < 24 || count > 256 || count % 8) find("setmaxnreg of %u registers", count);
  unsigned int threads = block_size.x, start = REGISTERS / threads / 8 * 8;
  if (more ? count < start : count > start) find("setmaxnreg to %u, from %u", count, start);
  of.registers = count;
}

// At the end of a block: whether all warpgroups together had no more registers than the block was
// launched with: one that waits for more would wait for ever.
inline void check_registers() {
  unsigned int start = REGISTERS / block_size.x / 8 * 8, sum = 0;
  bool are_set = false;
  for (const Warpgroup& of : block.warpgroups) {
    sum += 128 * (of.registers ? of.registers : start);
    are_set = are_set || of.registers;
  }
  if (are_set && sum > start * block_size.x) find("warpgroups have %u registers", sum);
}

// A matrix that a descriptor names.
struct Matrix {
  size_t start, leading, stride;
  unsigned int swizzle;
  explicit Matrix(u_int64_t bits)
      : start((bits & 0x3fff) << 4), leading((bits >> 16 & 0x3fff) << 4),
        stride((bits >> 32 & 0x3fff) << 4), swizzle((unsigned int)(bits >> 62)) {
    if (swizzle != 1) find("a descriptor has swizzle %u", swizzle);
    if (bits >> 14 & 3 || bits >> 30 & 3 || bits >> 46 & 0xffff & ~0xc000) {
      find("a descriptor has bits that mean nothing");
    }
  }
  // The byte of an element along m or n, and k. K-major rows are 128 bytes, eight of them repeat
  // after the stride. MN-major ones hold 64 elements, the next ones lie behind the leading offset;
  // eight along k repeat after the stride.
  size_t place_of_byte(size_t side, size_t k) const {
    return swizzled(start + side / 8 * stride + side % 8 * 128 + k);
  }
  size_t place(bool is_mn, size_t side, size_t k) const {
    size_t at = is_mn ? side / 64 * leading + side % 64 * 2 + k / 8 * stride + k % 8 * 128
                      : side / 8 * stride + side % 8 * 128 + k * 2;
    return swizzled(start + at);
  }
};

template <class T> float shared_element(size_t at) {
  T x;
  memcpy((void*)&x, shared_bytes(at, 2), 2);
  return widened(x);
}

template <class T> float shared_byte(size_t at) {
  T x;
  memcpy((void*)&x, shared_bytes(at, 1), 1);
  return widened(x);
}

// Adds a product to 64 x COLUMNS accumulators, of K points: x gives the elements of the first operand.
template <int COLUMNS, int K = 16, class X, class Y> void multiply(float* const* all, X x_at, Y y_at) {
  Uncounted here;
  static thread_local float x[64][K], y[K][COLUMNS], z[64][COLUMNS];
  for (int k = 0; k < K; k++) {
    for (int i = 0; i < 64; i++) x[i][k] = x_at(i, k);
    for (int j = 0; j < COLUMNS; j++) y[k][j] = y_at(j, k);
  }
  // The accumulators of a thread (PTX ISA, "wgmma accumulator"): two adjacent columns of two rows
  // that are eight apart, of every eight columns.
  auto each = [&](auto f) {
    for (int t = 0; t < 128; t++) {
      for (int i = 0; i < COLUMNS / 2; i++) {
        f(all[t][i], z[t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8][i / 4 * 8 + t % 4 * 2 + i % 2]);
      }
    }
  };
  each([](float& own, float& at) { at = own; });
  for (int i = 0; i < 64; i++) {
    for (int k = 0; k < K; k++) {
      for (int j = 0; j < COLUMNS; j++) z[i][j] += x[i][k] * y[k][j];
    }
  }
  each([](float& own, float& at) { own = at; });
}

// The pointers that the threads of a warpgroup have shown.
template <class P> std::vector<P> shown_by_warpgroup() {
  std::vector<P> all(128);
  for (size_t t = 0; t < 128; t++) all[t] = (P)block.shown[lane() / 128 * 128 + t];
  return all;
}

// The bytes of shared memory that a product may read: from the first to the last of a matrix.
inline std::pair<size_t, size_t> reads_of(const Matrix& m, bool is_mn, size_t side) {
  size_t low = ~(size_t)0, high = 0;
  for (size_t i = 0; i < side; i++) {
    for (size_t k = 0; k < 16; k++) {
      size_t at = m.place(is_mn, i, k);
      low = at < low ? at : low;
      high = at + 2 > high ? at + 2 : high;
    }
  }
  return {low, high};
}

}  // namespace shim

inline unsigned int shared_address(const void* place) {
  return (unsigned int)((const unsigned char*)place - shim::block.dynamic);
}
inline void mbarrier_init(unsigned long long* place, unsigned int arrivals) {
  shim::Mbarrier& barrier = shim::block.mbarriers[place];
  barrier.arrivals = barrier.pending = arrivals;
  barrier.owner = shim::block.current;
}
inline void mbarrier_init_fence() {
  for (auto& [place, barrier] : shim::block.mbarriers) {
    if (barrier.owner == shim::block.current) barrier.is_known = true;
  }
}
inline void mbarrier_expect(unsigned long long* place, unsigned int bytes) { shim::arrive(shim::known(place), bytes); }
inline void mbarrier_arrive(unsigned long long* place) {
  shim::arrive(shim::known(place), 0);
  shim::interleave();
}
inline void mbarrier_wait(unsigned long long* place, unsigned int parity) {
  shim::Mbarrier& barrier = shim::known(place);
  while (barrier.parity == parity && barrier.arrivals) {
    barrier.waiting.push_back(shim::block.current);
    shim::block.current->waits = "mbarrier_wait";
    shim::next();
    shim::block.current->waits = nullptr;
  }
  shim::block.current->meetings += 1;
  shim::interleave();
}
template <class... C> void tma_load(void* to, const TensorMap& map, unsigned long long* barrier, C... at) {
  int coordinates[] = {at...};
  shim::load_box(to, map, barrier, coordinates, sizeof...(at));
}
// What is fetched early is the same.
template <class... C> void tma_prefetch(const TensorMap& map, C...) {
  if ((size_t)map.count != sizeof...(C)) shim::find("a box has %zu coordinates", sizeof...(C));
}
template <class T, int N> void store_shared(void* to, const Vector<T, N>& x) {
  size_t at = (unsigned char*)to - shim::block.dynamic;
  shim::need_aligned<Vector<T, N>>(to);
  shim::check_not_read(at, sizeof x);
  static const char instruction = 0;
  shim::count_access(to, sizeof x, &instruction, false);
  shim::Uncounted here;
  memcpy(shim::shared_bytes(at, sizeof x), &x, sizeof x);
  shim::block.current->unfenced.push_back({at, at + sizeof x});
}
inline void fence_proxy_async() {
  shim::interleave_fence();
  shim::block.current->unfenced.clear();
}
inline void sync_warpgroup(unsigned int barrier) {
  if (barrier < 1 || barrier > 15) shim::find("there is no barrier %u", barrier);
  shim::interleave();
  shim::barrier_wait(shim::block.named[barrier], 128, "sync_warpgroup");
  shim::block.current->meetings += 1;
}
inline bool sync_warpgroup_or(unsigned int barrier, bool says) {
  return shim::meet_and_vote(barrier, says, [=] { sync_warpgroup(barrier); });
}
template <class... C> void tma_store(const TensorMap& map, const void* from, C... at) {
  int coordinates[] = {at...};
  shim::store_box(from, map, coordinates, sizeof...(at));
}
inline void tma_store_commit() {
  for (shim::TmaStore& store : shim::block.current->stores) store.is_committed = true;
}
inline void tma_store_wait() { shim::wait_for_stores(false); }
inline void tma_store_numbers(float* to, const void* from, unsigned int bytes) { shim::store_numbers(to, from, bytes, false); }
inline void tma_add_numbers(float* to, const void* from, unsigned int bytes) { shim::store_numbers(to, from, bytes, true); }
inline void tma_store_end() { shim::wait_for_stores(true); }
inline void fence_global_async() { shim::block.current->has_waited = shim::block.current->has_stored = false; }
template <int COUNT> void setmaxnreg_dec() { shim::set_registers(COUNT, false); }
template <int COUNT> void setmaxnreg_inc() { shim::set_registers(COUNT, true); }
template <class T> void keep_order(T&) {}
template <int N> void warpgroup_fence(float (&)[N]) {
  shim::warpgroup_collective(nullptr, [] { shim::warpgroup().is_fenced = true; });
}
inline void warpgroup_commit() {
  shim::warpgroup_collective(nullptr, [] {
    shim::warpgroup().group += 1;
    shim::warpgroup().is_fenced = false;
  });
}
template <int LAST, int N> void warpgroup_wait(float (&)[N]) {
  shim::warpgroup_collective(nullptr, [] {
    shim::Warpgroup& of = shim::warpgroup();
    std::vector<shim::Multiplication> later;
    for (shim::Multiplication& one : of.pending) {
      if (one.group + LAST < of.group) one.run();
      else later.push_back(std::move(one));
    }
    of.pending.swap(later);
  });
}
template <class T, int A_MN, int B_MN, int COUNT>
void warpgroup_mma(float (&c)[COUNT], u_int64_t a, u_int64_t b) {
  shim::warpgroup_collective(c, [=] {
    shim::Warpgroup& of = shim::warpgroup();
    if (!of.is_fenced) shim::find("a warpgroup multiplies without a fence");
    std::vector<float*> all = shim::shown_by_warpgroup<float*>();
    shim::Matrix x(a), y(b);
    auto x_at = [=](int i, int k) { return shim::shared_element<T>(x.place(A_MN, i, k)); };
    auto y_at = [=](int j, int k) { return shim::shared_element<T>(y.place(B_MN, j, k)); };
    auto run = [=] { shim::multiply<2 * COUNT>(all.data(), x_at, y_at); };
    std::vector<std::pair<size_t, size_t>> reads = {shim::reads_of(x, A_MN, 64), shim::reads_of(y, B_MN, 2 * COUNT)};
    shim::check_reads(reads);
    of.pending.push_back(shim::Multiplication{reads, run, of.group});
  });
}
// The same of bytes: what is read are as many bytes of each row.
template <class A, class B, int COUNT>
void warpgroup_mma_bytes(float (&c)[COUNT], u_int64_t a, u_int64_t b) {
  shim::warpgroup_collective(c, [=] {
    shim::Warpgroup& of = shim::warpgroup();
    if (!of.is_fenced) shim::find("a warpgroup multiplies without a fence");
    std::vector<float*> all = shim::shown_by_warpgroup<float*>();
    shim::Matrix x(a), y(b);
    auto x_at = [=](int i, int k) { return shim::shared_byte<A>(x.place_of_byte(i, k)); };
    auto y_at = [=](int j, int k) { return shim::shared_byte<B>(y.place_of_byte(j, k)); };
    auto run = [=] { shim::multiply<2 * COUNT, 32>(all.data(), x_at, y_at); };
    std::vector<std::pair<size_t, size_t>> reads = {shim::reads_of(x, false, 64), shim::reads_of(y, false, 2 * COUNT)};
    shim::check_reads(reads);
    of.pending.push_back(shim::Multiplication{reads, run, of.group});
  });
}
// Fragments too are read when the product is waited for: until then they must stay as they are.
template <class T, int B_MN, int COUNT>
void warpgroup_mma(float (&c)[COUNT], const unsigned int (&a)[4], u_int64_t b) {
  struct Mine { float* c; const unsigned int* a; } mine = {c, a};
  shim::warpgroup_collective(&mine, [=] {
    shim::Warpgroup& of = shim::warpgroup();
    if (!of.is_fenced) shim::find("a warpgroup multiplies without a fence");
    std::vector<float*> all;
    std::vector<const unsigned int*> fragments;
    for (Mine* one : shim::shown_by_warpgroup<Mine*>()) {
      all.push_back(one->c);
      fragments.push_back(one->a);
    }
    shim::Matrix y(b);
    // Registers of a row: of its first eight elements and the others, those of rows 8 to 15 second.
    auto x_at = [=](int i, int k) {
      const unsigned int* of_lane = fragments[i / 16 * 32 + i % 8 * 4 + k % 8 / 2];
      return half_of<T>(of_lane[i % 16 / 8 + k / 8 * 2], k % 2);
    };
    auto y_at = [=](int j, int k) { return shim::shared_element<T>(y.place(B_MN, j, k)); };
    auto run = [=] { shim::multiply<2 * COUNT>(all.data(), x_at, y_at); };
    std::vector<std::pair<size_t, size_t>> reads = {shim::reads_of(y, B_MN, 2 * COUNT)};
    shim::check_reads(reads);
    of.pending.push_back(shim::Multiplication{reads, run, of.group});
  });
}

// ---- checked mode: the compiler's hooks of loads and stores look for races, uninitialised reads and
// accesses out of bounds in shared memory

#ifdef SHIM_CHECKED
#define UNCHECKED __attribute__((no_sanitize("thread")))

namespace shim {

struct Access { unsigned int thread, blocks, warps; };

// The accesses to a byte in the block of that number: the last write, and the last two reads.
struct Shadow {
  u_int64_t of;
  Access write, reads[2];
};

inline Shadow* new_shadow(size_t bytes) { return (Shadow*)calloc(bytes, sizeof(Shadow)); }

inline UNCHECKED bool happens_before(const Access& access, const Access& now) {
  if (access.thread == ~0u || access.thread == now.thread || access.blocks < now.blocks) return true;
  return access.thread / 32 == now.thread / 32 && access.warps < now.warps;
}

inline UNCHECKED void report_first(const SharedArray& array, size_t at, unsigned int thread, const char* what,
                           unsigned int other) {
  if (report[0]) return;
  int end = snprintf(report, sizeof report, "thread %u of block %u %s byte %zu of %s", thread,
                     block_index.x, what, at, array.name);
  if (other != ~0u) snprintf(report + end, sizeof report - end, " by thread %u", other);
}

inline UNCHECKED void access_byte(const SharedArray& array, size_t at, const Access& now, bool writes) {
  Shadow& shadow = array.shadow[at];
  if (shadow.of != serial) {
    Access nobody = {~0u, 0, 0};
    shadow.of = serial;
    shadow.write = shadow.reads[0] = shadow.reads[1] = nobody;
  }
  if (!happens_before(shadow.write, now)) report_first(array, at, now.thread, "races with a write of", shadow.write.thread);
  if (!writes) {
    if (shadow.write.thread == ~0u) report_first(array, at, now.thread, "reads what nobody wrote,", ~0u);
    if (shadow.reads[0].thread != now.thread) shadow.reads[1] = shadow.reads[0];
    shadow.reads[0] = now;
    return;
  }
  for (int i = 0; i < 2; i++) {
    if (!happens_before(shadow.reads[i], now)) {
      report_first(array, at, now.thread, "races with a read of", shadow.reads[i].thread);
    }
  }
  shadow.write = now;
}

inline UNCHECKED void access_shared(unsigned int thread, const void* place, size_t bytes, bool writes) {
  const unsigned char* p = (const unsigned char*)place;
  for (size_t at = 0; at < running->array_count; at++) {
    const SharedArray& array = running->arrays[at];
    if (p < array.start || p >= array.start + 2 * array.before + array.bytes) continue;
    const Fiber* me = running->current;
    Access now = {thread, me->blocks, me->warps};
    for (size_t i = 0; i < bytes; i++) {
      size_t offset = (size_t)(p + i - array.start) - array.before;
      if (offset >= array.bytes) {
        report_first(array, offset, thread, "is beyond, at", ~0u);
        return;
      }
      access_byte(array, offset, now, writes);
    }
    return;
  }
}

inline UNCHECKED void land_store(const SharedArray& array, size_t at, size_t bytes, u_int64_t block,
                                 const unsigned int passed[2]) {
  for (size_t i = at; i < at + bytes; i++) {
    Shadow& shadow = array.shadow[i];
    Access nobody = {~0u, 0, 0};
    if (shadow.of != block) shadow = Shadow{block, nobody, {nobody, nobody}};
    // What the block's threads did since the cluster last met is in no order with the store.
    for (const Access& other : {shadow.write, shadow.reads[0], shadow.reads[1]}) {
      if (other.thread != ~0u && other.blocks >= passed[0]) {
        find("a block stores byte %zu of %s, which thread %u accesses", i, array.name, other.thread);
      }
    }
    shadow.write = Access{0, passed[1], 0};
  }
}

// ---- what blocks share by turns
//
// Of each other block a block knows what that had done before some barrier of its own: what it wrote
// is then seen. It learns that from a counter, where another has left it. The same is known of what a
// warp of another block had done before some barrier of the warp, by the warp that has learnt it.

// Bytes of a buffer that blocks share, and the accesses to each word.
struct GlobalAccess { unsigned int block; Access of; };
struct GlobalShadow { GlobalAccess write, reads[2]; };
inline thread_local const unsigned char* shared_start = nullptr;
inline thread_local size_t shared_bytes_count = 0;
inline thread_local GlobalShadow* global_shadow = nullptr;

// All barriers of another block before this one are known, since a thread has acquired it after a
// number of barriers of its own: to that thread, and to others behind the next barrier.
struct Known { unsigned int settled, fresh, thread, blocks; };
inline thread_local Known* known_blocks = nullptr;
inline thread_local unsigned int turn_blocks = 0;
// All barriers of a warp of another block before this one are known to a warp, since its thread has
// acquired it after a number of barriers of the warp.
struct KnownWarp { unsigned int settled, fresh, thread, warps; };
inline thread_local KnownWarp* known_warps = nullptr;
inline thread_local unsigned int turn_warps = 0;
// What is left at counters, for each block, and behind that for each warp of each.
inline thread_local std::map<const unsigned int*, std::vector<unsigned int>> left_at;

inline void share(const void* start, size_t bytes) {
  shared_start = (const unsigned char*)start;
  shared_bytes_count = bytes;
  global_shadow = (GlobalShadow*)malloc(bytes / 4 * sizeof(GlobalShadow));
  memset((void*)global_shadow, 0xff, bytes / 4 * sizeof(GlobalShadow));
}
inline void begin_turns(u_int64_t blocks, unsigned int threads) {
  turn_blocks = (unsigned int)blocks;
  turn_warps = (threads + 31) / 32;
  known_blocks = (Known*)calloc(blocks * blocks, sizeof(Known));
  known_warps = (KnownWarp*)calloc(blocks * blocks * turn_warps * turn_warps, sizeof(KnownWarp));
  left_at.clear();
}
inline void unshare() {
  free(global_shadow);
  free(known_blocks);
  free(known_warps);
  global_shadow = nullptr;
  known_blocks = nullptr;
  known_warps = nullptr;
  shared_bytes_count = 0;
}

// The first barrier of another block that the running thread does not know to have been passed.
inline UNCHECKED unsigned int known_of(unsigned int other) {
  const Known& known = known_blocks[(size_t)block_index.x * turn_blocks + other];
  const Fiber* me = running->current;
  bool is_seen = known.thread == me->index.x || known.blocks < me->blocks;
  return is_seen && known.fresh > known.settled ? known.fresh : known.settled;
}

// What the warp of the running thread knows of a warp of all blocks.
inline UNCHECKED KnownWarp& known_warp(unsigned int other) {
  size_t own = (size_t)block_index.x * turn_warps + running->current->index.x / 32;
  return known_warps[own * turn_blocks * turn_warps + other];
}
// The first barrier of a warp of another block that the running thread does not know to have passed.
inline UNCHECKED unsigned int known_of_warp(unsigned int other) {
  const KnownWarp& known = known_warp(other);
  const Fiber* me = running->current;
  bool is_seen = known.thread == me->index.x || known.warps < me->warps;
  return is_seen && known.fresh > known.settled ? known.fresh : known.settled;
}

inline void acquire(const unsigned int* counter) {
  auto found = left_at.find(counter);
  if (found == left_at.end()) return;
  const Fiber* me = running->current;
  for (unsigned int other = 0; other < turn_blocks * turn_warps; other++) {
    unsigned int settled = known_of_warp(other), fresh = found->second[turn_blocks + other];
    known_warp(other) = KnownWarp{settled, fresh, me->index.x, me->warps};
  }
  for (unsigned int other = 0; other < turn_blocks; other++) {
    Known& known = known_blocks[(size_t)block_index.x * turn_blocks + other];
    unsigned int settled = known_of(other), fresh = found->second[other];
    known = Known{settled, fresh, block.current->index.x, block.current->blocks};
  }
}
inline void release(const unsigned int* counter) {
  std::vector<unsigned int>& left = left_at[counter];
  left.assign(turn_blocks + turn_blocks * turn_warps, 0);
  for (unsigned int other = 0; other < turn_blocks; other++) left[other] = known_of(other);
  left[block_index.x] = block.current->blocks;
  for (unsigned int other = 0; other < turn_blocks * turn_warps; other++) {
    left[turn_blocks + other] = known_of_warp(other);
  }
  unsigned int own = block_index.x * turn_warps + block.current->index.x / 32;
  left[turn_blocks + own] = block.current->warps;
}

inline UNCHECKED bool is_known(const GlobalAccess& access, const Access& now) {
  if (access.block == ~0u) return true;
  if (access.block == block_index.x) return happens_before(access.of, now);
  if (access.of.blocks < known_of(access.block)) return true;
  return access.of.warps < known_of_warp(access.block * turn_warps + access.of.thread / 32);
}

inline UNCHECKED void report_global(const Access& now, const char* what, const GlobalAccess& other) {
  if (report[0]) return;
  snprintf(report, sizeof report, "thread %u of block %u %s thread %u of block %u", now.thread,
           block_index.x, what, other.of.thread, other.block);
}

inline UNCHECKED void access_global(const unsigned char* place, size_t bytes, bool writes) {
  const Fiber* me = running->current;
  Access now = {me->index.x, me->blocks, me->warps};
  for (size_t i = 0; i < bytes; i += 4) {
    GlobalShadow& shadow = global_shadow[(size_t)(place + i - shared_start) / 4];
    if (!is_known(shadow.write, now)) report_global(now, "has not waited for the write of", shadow.write);
    if (!writes) {
      if (shadow.write.block == ~0u) report_global(now, "reads what nobody wrote, as", shadow.write);
      if (shadow.reads[0].block != block_index.x) shadow.reads[1] = shadow.reads[0];
      shadow.reads[0] = GlobalAccess{block_index.x, now};
      continue;
    }
    for (int r = 0; r < 2; r++) {
      if (!is_known(shadow.reads[r], now)) report_global(now, "has not waited for the read of", shadow.reads[r]);
    }
    shadow.write = GlobalAccess{block_index.x, now};
  }
}

inline UNCHECKED void read_shared_sums(const void* place, size_t bytes) {
  const unsigned char* p = (const unsigned char*)place;
  if (p >= shared_start && p < shared_start + shared_bytes_count) access_global(p, bytes, false);
}

inline UNCHECKED void hook(const void* place, size_t bytes, bool writes, const void* instruction) {
  const unsigned char* p = (const unsigned char*)place;
  if (running) {
    access_shared(thread_index.x, place, bytes, writes);
    if (p >= shared_start && p < shared_start + shared_bytes_count) access_global(p, bytes, writes);
  }
  count_access(place, bytes, instruction, false);
}

}  // namespace shim

#define CALLER __builtin_return_address(0)
#define HOOKS(N)                                                                               \
  UNCHECKED void __tsan_read##N(void* place) { shim::hook(place, N, false, CALLER); }          \
  UNCHECKED void __tsan_write##N(void* place) { shim::hook(place, N, true, CALLER); }          \
  UNCHECKED void __tsan_unaligned_read##N(void* place) { shim::hook(place, N, false, CALLER); } \
  UNCHECKED void __tsan_unaligned_write##N(void* place) { shim::hook(place, N, true, CALLER); }
extern "C" {
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
UNCHECKED void __tsan_init() {}
UNCHECKED void __tsan_func_entry(void*) {}
UNCHECKED void __tsan_func_exit() {}
UNCHECKED void __tsan_vptr_update(void**, void*) {}
UNCHECKED void __tsan_vptr_read(void**) {}
UNCHECKED void __tsan_read_range(void* place, size_t bytes) { shim::hook(place, bytes, false, CALLER); }
UNCHECKED void __tsan_write_range(void* place, size_t bytes) { shim::hook(place, bytes, true, CALLER); }
}
#endif
