// What texts call behind the prelude for CPUs: blocks and their fibers, barriers, turns, clusters,
// and what a warp exchanges.

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>
#include <sys/mman.h>

#pragma GCC visibility push(hidden)

// Of what accesses no memory of texts, or looks at such accesses itself.
#define UNCHECKED __attribute__((no_sanitize("thread")))

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
thread_local Block block;
// The same for hooks, where its threads run: theirs must not be called for it.
thread_local Block* running = nullptr;
// What each thread runs.
thread_local const Body* body = nullptr;
// Counters that blocks of a launch have taken tickets of.
thread_local std::set<const unsigned int*> ticketed;
// How many blocks there may be at a time.
thread_local u_int64_t residents = 1;
// Blocks of a cluster, and the clusters that have begun.
thread_local unsigned int cluster_blocks = 1;
thread_local std::map<unsigned int, Cluster> clusters;
// The first finding since it was last asked for.
thread_local char report[256];
// Stacks of no block.
thread_local std::vector<char*> stacks;
// Arrays of no block, to be used again.
thread_local std::vector<SharedArray> arrays_left;
// The number of the block that runs, and of the last one that has begun.
thread_local u_int64_t serial = 0, serial_last = 0;
__thread Index thread_index, block_index, block_size, grid_size;

const size_t STACK = 64 << 10;

// What is known of the accesses to an array in shared memory.
Shadow* new_shadow(size_t bytes);
void unshare();
void begin_turns(u_int64_t blocks, unsigned int threads);
// A thread reads what blocks share, but not by a load of its own.
void read_shared_sums(const void* place, size_t bytes);
// A thread has waited for a turn, or ends it.
void acquire(const unsigned int* counter);
void release(const unsigned int* counter);
#ifndef SHIM_CHECKED
inline Shadow* new_shadow(size_t) { return nullptr; }
void share(const void*, size_t) {}
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
thread_local bool is_internal = false;
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

void find(const char* format, ...) {
  if (report[0]) return;
  va_list of;
  va_start(of, format);
  vsnprintf(report, sizeof report, format, of);
  va_end(of);
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
  body->call(body->of);
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

// The number of the fiber that runs.
inline unsigned int lane() { return thread_index.x; }

void check_registers();

void* shared_array(const char* name, size_t before, size_t bytes) {
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

u_int64_t resident(u_int64_t all, u_int64_t seed) { return std::min<u_int64_t>(all, 1 + seed % 4); }

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

UNCHECKED void launch(u_int64_t blocks, unsigned int threads, bool synchronizes, u_int64_t seed, Body of) {
  block_size = Index{threads, 1, 1};
  grid_size = Index{(unsigned int)blocks, 1, 1};
  if (synchronizes) {
    body = &of;
    run_blocks(blocks, threads, seed);
    body = nullptr;
    return;
  }
  for (u_int64_t at = 0; at < blocks; at++) {
    block_index = Index{(unsigned int)at, 0, 0};
    serial = serial_last += 1;
    for (unsigned int i = 0; i < threads; i++) {
      thread_index = Index{seed & 1 ? threads - 1 - i : i, 0, 0};
      of.call(of.of);
    }
  }
}

// The same, of whose blocks some are there at a time.
inline void launch_together(u_int64_t blocks, u_int64_t at_once, unsigned int threads, u_int64_t seed, Body of) {
  residents = at_once;
  begin_turns(blocks, threads);
  launch(blocks, threads, true, seed, of);
  unshare();
  residents = 1;
  // The next launch finds them as this one has.
  Uncounted here;
  for (const unsigned int* counter : ticketed) {
    if (*counter) find("of a counter %u tickets are left", *counter);
  }
  ticketed.clear();
}

void launch_turns(u_int64_t blocks, unsigned int threads, u_int64_t seed, Body of) {
  launch_together(blocks, resident(blocks, seed), threads, seed, of);
}

void launch_tickets(u_int64_t blocks, unsigned int threads, u_int64_t seed, Body of) {
  launch_together(blocks, std::min<u_int64_t>(blocks, 1 + seed % 2 * 15), threads, seed, of);
}

void launch_clusters(u_int64_t blocks, unsigned int threads, unsigned int cluster, u_int64_t seed, Body of) {
  cluster_blocks = cluster;
  residents = cluster * (1 + seed % 2);
  clusters.clear();
  launch(blocks, threads, true, seed, of);
  clusters.clear();
  residents = cluster_blocks = 1;
}

}  // namespace shim
// The first finding since the last call, or nothing.
extern "C" __attribute__((visibility("default"))) const char* shim_report() {
  static thread_local char told[sizeof shim::report];
  memcpy(told, shim::report, sizeof told);
  shim::report[0] = 0;
  return told;
}

void sync_block() {
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
bool sync_block_or(bool says) { return shim::meet_and_vote(0, says, sync_block); }
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
void wait_for_turn(const unsigned int* counter, unsigned int turn) {
  shim::wait_for(counter, turn);
  shim::acquire(counter);
  shim::block.current->has_waited = true;
}
bool take_ticket(unsigned int* counter, unsigned int tickets) {
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
void end_turn(unsigned int* counter, unsigned int next) {
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
void sync_cluster() {
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
void shim::store_in_cluster(const void* place, unsigned int rank, const void* value, size_t bytes) {
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
    const unsigned char* first = (const unsigned char*)value;
    cluster.stores.push_back(shim::ClusterStore{rank, array.name, offset, std::vector<unsigned char>(first, first + bytes)});
    return;
  }
  shim::find("thread %u stores beyond the shared memory of its cluster", threadIdx.x);
}
void sync_warp() {
  shim::sync_lanes("sync_warp");
  shim::block.current->warps += 1;
  shim::block.current->meetings += 1;
}
const void* shim::show(const void* own, int lane) {
  unsigned int me = shim::lane();
  block.shown[me] = own;
  sync_lanes("shuffle");
  return block.shown[me / 32 * 32 + (unsigned int)lane];
}
void shim::end_show() { sync_lanes("shuffle"); }
unsigned int ballot(bool holds) {
  unsigned int me = shim::lane(), mask = 0;
  shim::block.shown[me] = &holds;
  shim::sync_lanes("ballot");
  for (unsigned int lane = 0; lane < 32; lane++) {
    mask |= (unsigned int)*(const bool*)shim::block.shown[me / 32 * 32 + lane] << lane;
  }
  shim::sync_lanes("ballot");
  return mask;
}
void shim::end_unaligned(const void*, size_t bytes) {
  fprintf(stderr, "thread %u of block %u accesses %zu bytes that are not aligned\n", thread_index.x,
          block_index.x, bytes);
  abort();
}

