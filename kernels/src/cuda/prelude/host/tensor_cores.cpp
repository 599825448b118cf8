// Asynchronous copies, and tensor cores.

// ---- asynchronous copies to shared memory

void shim::copy_async(void* to, const void* from, size_t bytes, bool is_there, const char instructions[2]) {
  Fiber& me = *block.current;
  if ((uintptr_t)to % bytes || (uintptr_t)from % bytes) {
    fprintf(stderr, "thread %u copies %zu bytes to or from where they are not aligned\n",
            me.index.x, bytes);
    abort();
  }
  if (is_there) read_shared_sums(from, bytes);
  if (is_there) count_access(from, bytes, instructions, false);
  else pass_access(instructions);
  count_access(to, bytes, instructions + 1, false);
  // The bytes may be written at any time until the copy is waited for.
  access_shared(me.index.x, to, bytes, true);
  me.copies.push_back(Copy{to, is_there ? from : nullptr, bytes, me.group});
}
void cp_async_commit() { shim::block.current->group += 1; }
void shim::wait_for_copies(u_int64_t open) {
  Fiber& me = *block.current;
  std::vector<Copy> later;
  for (const Copy& copy : me.copies) {
    if (copy.group + open >= me.group) {
      later.push_back(copy);
      continue;
    }
    access_shared(me.index.x, copy.to, copy.bytes, true);
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

void ldmatrix(unsigned int (&x)[4], const void* row) { shim::load(x, row, false); }
void ldmatrix_trans(unsigned int (&x)[4], const void* row) { shim::load(x, row, true); }

// An element of a register of two.
template <class T> float half_of(unsigned int two, int h) {
  unsigned short bits = (unsigned short)(two >> 16 * h);
  T x;
  memcpy((void*)&x, &bits, 2);
  return widened(x);
}
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

namespace shim {

// Room for the numbers of a matrix that is multiplied, and of the product.
struct Numbers {
  std::vector<float> all;
  float* of(size_t count) {
    if (all.size() < count) all.resize(count);
    return all.data();
  }
};
thread_local Numbers left_numbers, right_numbers, product_numbers;

// Adds the product of m x k numbers and k x n ones to m x n: each sum in the order of k.
UNCHECKED void multiply(float* z, const float* x, const float* y, int m, int n, int k) {
  for (int i = 0; i < m; i++) {
    for (int at = 0; at < k; at++) {
      const float factor = x[i * k + at];
      for (int j = 0; j < n; j++) z[i * n + j] += factor * y[at * n + j];
    }
  }
}

// What a lane has of a product of a warp.
struct Fragments { float* c; const unsigned int *a, *b; };

template <class A, class B> UNCHECKED void multiply_lanes(Fragments** all, int m, int n) {
  // Elements of a register, and of a step along k, which has eight of them.
  const int E = Register<A>::COUNT, K = 8 * E, cols = n * 8;
  float *x = left_numbers.of(m * 16 * K), *y = right_numbers.of(K * cols), *z = product_numbers.of(m * 16 * cols);
  for (int lane = 0; lane < 32; lane++) {
    const Fragments& of = *all[lane];
    int row = lane / 4, col = lane % 4 * 2, k = lane % 4 * E;
    for (int i = 0; i < m; i++) {
      for (int r = 0; r < 4; r++) {
        for (int e = 0; e < E; e++) {
          x[(i * 16 + row + r % 2 * 8) * K + k + r / 2 * 4 * E + e] = Register<A>::at(of.a[i * 4 + r], e);
        }
      }
    }
    for (int j = 0; j < n; j++) {
      for (int r = 0; r < 2; r++) {
        for (int e = 0; e < E; e++) {
          y[(k + r * 4 * E + e) * cols + j * 8 + row] = Register<B>::at(of.b[j / 2 * 4 + j % 2 * 2 + r], e);
        }
      }
    }
    for (int i = 0; i < m; i++) {
      for (int j = 0; j < n; j++) {
        for (int q = 0; q < 4; q++) {
          z[(i * 16 + row + q / 2 * 8) * cols + j * 8 + col + q % 2] = of.c[(i * n + j) * 4 + q];
        }
      }
    }
  }
  multiply(z, x, y, m * 16, cols, K);
  for (int lane = 0; lane < 32; lane++) {
    int row = lane / 4, col = lane % 4 * 2;
    for (int i = 0; i < m; i++) {
      for (int j = 0; j < n; j++) {
        for (int q = 0; q < 4; q++) {
          all[lane]->c[(i * n + j) * 4 + q] = z[(i * 16 + row + q / 2 * 8) * cols + j * 8 + col + q % 2];
        }
      }
    }
  }
}

template <class A, class B>
void multiply_by_warp(float* c, const unsigned int* a, const unsigned int* b, int m, int n) {
  warp_collective(Fragments{c, a, b}, [=](Fragments** all) { multiply_lanes<A, B>(all, m, n); });
}
// Both types of bytes, each with each.
#define PAIRS_OF_BYTES(DO) \
  DO(f8e4m3, f8e4m3); DO(f8e4m3, f8e5m2); DO(f8e5m2, f8e4m3); DO(f8e5m2, f8e5m2)
#define MULTIPLY(A, B) \
  template void multiply_by_warp<A, B>(float*, const unsigned int*, const unsigned int*, int, int)
MULTIPLY(bf16, bf16);
MULTIPLY(f16, f16);
MULTIPLY(tf32, tf32);
PAIRS_OF_BYTES(MULTIPLY);
#undef MULTIPLY

}  // namespace shim

// ---- sm_90a: copies by TMA, mbarriers, and tensor cores of warpgroups
//
// The worst that the machine may do: copies land when no thread can go on, or where one arrives at a
// barrier; products read shared memory when they are waited for. What is written between that and
// their issue, by threads or by copies, is reported.

namespace shim {

// Registers of a multiprocessor.
const unsigned int REGISTERS = 65536;

unsigned char* dynamic_shared(size_t bytes) {
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

void load_box(void* to, const TensorMap& map, const void* place, const int* coordinates, int count) {
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
void store_box(const void* from, const TensorMap& map, const int* first, int count) {
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

void set_registers(unsigned int count, bool more) {
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

// Adds a product to 64 x `columns` accumulators, of K points: x gives the elements of the first operand.
template <int K = 16, class X, class Y>
UNCHECKED void multiply_tiles(float* const* all, int columns, X x_at, Y y_at) {
  Uncounted here;
  float *x = left_numbers.of(64 * K), *y = right_numbers.of(K * columns), *z = product_numbers.of(64 * columns);
  for (int k = 0; k < K; k++) {
    for (int i = 0; i < 64; i++) x[i * K + k] = x_at(i, k);
    for (int j = 0; j < columns; j++) y[k * columns + j] = y_at(j, k);
  }
  // The accumulators of a thread (PTX ISA, "wgmma accumulator"): two adjacent columns of two rows
  // that are eight apart, of every eight columns.
  auto each = [=](auto f) {
    for (int t = 0; t < 128; t++) {
      for (int i = 0; i < columns / 2; i++) {
        f(all[t][i], z[(t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8) * columns + i / 4 * 8 + t % 4 * 2 + i % 2]);
      }
    }
  };
  each([](float& own, float& at) { at = own; });
  multiply(z, x, y, 64, columns, K);
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

unsigned int shared_address(const void* place) {
  return (unsigned int)((const unsigned char*)place - shim::block.dynamic);
}
void mbarrier_init(unsigned long long* place, unsigned int arrivals) {
  shim::Mbarrier& barrier = shim::block.mbarriers[place];
  barrier.arrivals = barrier.pending = arrivals;
  barrier.owner = shim::block.current;
}
void mbarrier_init_fence() {
  for (auto& [place, barrier] : shim::block.mbarriers) {
    if (barrier.owner == shim::block.current) barrier.is_known = true;
  }
}
void mbarrier_expect(unsigned long long* place, unsigned int bytes) { shim::arrive(shim::known(place), bytes); }
void mbarrier_arrive(unsigned long long* place) {
  shim::arrive(shim::known(place), 0);
  shim::interleave();
}
void mbarrier_wait(unsigned long long* place, unsigned int parity) {
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
void shim::store_shared(void* to, const void* from, size_t bytes, const void* instruction) {
  size_t at = (unsigned char*)to - block.dynamic;
  if ((uintptr_t)to % bytes) end_unaligned(to, bytes);
  check_not_read(at, bytes);
  count_access(to, bytes, instruction, false);
  Uncounted here;
  memcpy(shared_bytes(at, bytes), from, bytes);
  block.current->unfenced.push_back({at, at + bytes});
}
void fence_proxy_async() {
  shim::interleave_fence();
  shim::block.current->unfenced.clear();
}
void sync_warpgroup(unsigned int barrier) {
  if (barrier < 1 || barrier > 15) shim::find("there is no barrier %u", barrier);
  shim::interleave();
  shim::barrier_wait(shim::block.named[barrier], 128, "sync_warpgroup");
  shim::block.current->meetings += 1;
}
bool sync_warpgroup_or(unsigned int barrier, bool says) {
  return shim::meet_and_vote(barrier, says, [=] { sync_warpgroup(barrier); });
}
void tma_store_commit() {
  for (shim::TmaStore& store : shim::block.current->stores) store.is_committed = true;
}
void tma_store_wait() { shim::wait_for_stores(false); }
void tma_store_numbers(float* to, const void* from, unsigned int bytes) { shim::store_numbers(to, from, bytes, false); }
void tma_add_numbers(float* to, const void* from, unsigned int bytes) { shim::store_numbers(to, from, bytes, true); }
void tma_store_end() { shim::wait_for_stores(true); }
void fence_global_async() { shim::block.current->has_waited = shim::block.current->has_stored = false; }
void shim::fence_products() {
  warpgroup_collective(nullptr, [] { warpgroup().is_fenced = true; });
}
void warpgroup_commit() {
  shim::warpgroup_collective(nullptr, [] {
    shim::warpgroup().group += 1;
    shim::warpgroup().is_fenced = false;
  });
}

namespace shim {

void wait_for_products(u_int64_t open) {
  warpgroup_collective(nullptr, [=] {
    Warpgroup& of = warpgroup();
    std::vector<Multiplication> later;
    for (Multiplication& one : of.pending) {
      if (one.group + open < of.group) one.run();
      else later.push_back(std::move(one));
    }
    of.pending.swap(later);
  });
}

// Issues a product, which reads some bytes of shared memory when it is waited for.
inline void issue(const std::vector<std::pair<size_t, size_t>>& reads, std::function<void()> run) {
  Warpgroup& of = warpgroup();
  check_reads(reads);
  of.pending.push_back(Multiplication{reads, std::move(run), of.group});
}
inline void check_products_fenced() {
  if (!warpgroup().is_fenced) find("a warpgroup multiplies without a fence");
}

template <class T> void multiply_shared(float* c, int count, u_int64_t a, u_int64_t b, bool a_is_mn, bool b_is_mn) {
  warpgroup_collective(c, [=] {
    check_products_fenced();
    std::vector<float*> all = shown_by_warpgroup<float*>();
    Matrix x(a), y(b);
    auto x_at = [=](int i, int k) { return shared_element<T>(x.place(a_is_mn, i, k)); };
    auto y_at = [=](int j, int k) { return shared_element<T>(y.place(b_is_mn, j, k)); };
    auto run = [=] { multiply_tiles(all.data(), 2 * count, x_at, y_at); };
    issue({reads_of(x, a_is_mn, 64), reads_of(y, b_is_mn, 2 * count)}, run);
  });
}
template <class A, class B> void multiply_shared_bytes(float* c, int count, u_int64_t a, u_int64_t b) {
  warpgroup_collective(c, [=] {
    check_products_fenced();
    std::vector<float*> all = shown_by_warpgroup<float*>();
    Matrix x(a), y(b);
    auto x_at = [=](int i, int k) { return shared_byte<A>(x.place_of_byte(i, k)); };
    auto y_at = [=](int j, int k) { return shared_byte<B>(y.place_of_byte(j, k)); };
    auto run = [=] { multiply_tiles<32>(all.data(), 2 * count, x_at, y_at); };
    issue({reads_of(x, false, 64), reads_of(y, false, 2 * count)}, run);
  });
}
template <class T>
void multiply_fragments(float* c, int count, const unsigned int* a, u_int64_t b, bool b_is_mn) {
  struct Mine { float* c; const unsigned int* a; } mine = {c, a};
  warpgroup_collective(&mine, [=] {
    check_products_fenced();
    std::vector<float*> all;
    std::vector<const unsigned int*> fragments;
    for (Mine* one : shown_by_warpgroup<Mine*>()) {
      all.push_back(one->c);
      fragments.push_back(one->a);
    }
    Matrix y(b);
    // Registers of a row: of its first eight elements and the others, those of rows 8 to 15 second.
    auto x_at = [=](int i, int k) {
      const unsigned int* of_lane = fragments[i / 16 * 32 + i % 8 * 4 + k % 8 / 2];
      return half_of<T>(of_lane[i % 16 / 8 + k / 8 * 2], k % 2);
    };
    auto y_at = [=](int j, int k) { return shared_element<T>(y.place(b_is_mn, j, k)); };
    auto run = [=] { multiply_tiles(all.data(), 2 * count, x_at, y_at); };
    issue({reads_of(y, b_is_mn, 2 * count)}, run);
  });
}

#define MULTIPLY(T)                                                                          \
  template void multiply_shared<T>(float*, int, u_int64_t, u_int64_t, bool, bool);           \
  template void multiply_fragments<T>(float*, int, const unsigned int*, u_int64_t, bool)
MULTIPLY(bf16);
MULTIPLY(f16);
#undef MULTIPLY
#define MULTIPLY(A, B) template void multiply_shared_bytes<A, B>(float*, int, u_int64_t, u_int64_t)
PAIRS_OF_BYTES(MULTIPLY);
#undef MULTIPLY

}  // namespace shim
