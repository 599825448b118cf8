// ---- checked mode: the compiler's hooks of loads and stores look for races, uninitialised reads and
// accesses out of bounds in shared memory

#ifdef SHIM_CHECKED

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
thread_local const unsigned char* shared_start = nullptr;
thread_local size_t shared_bytes_count = 0;
thread_local GlobalShadow* global_shadow = nullptr;

// All barriers of another block before this one are known, since a thread has acquired it after a
// number of barriers of its own: to that thread, and to others behind the next barrier.
struct Known { unsigned int settled, fresh, thread, blocks; };
thread_local Known* known_blocks = nullptr;
thread_local unsigned int turn_blocks = 0;
// All barriers of a warp of another block before this one are known to a warp, since its thread has
// acquired it after a number of barriers of the warp.
struct KnownWarp { unsigned int settled, fresh, thread, warps; };
thread_local KnownWarp* known_warps = nullptr;
thread_local unsigned int turn_warps = 0;
// What is left at counters, for each block, and behind that for each warp of each.
thread_local std::map<const unsigned int*, std::vector<unsigned int>> left_at;

void share(const void* start, size_t bytes) {
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

#pragma GCC visibility pop
