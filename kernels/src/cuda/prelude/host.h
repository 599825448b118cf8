// The prelude for CPUs: threads of a block are fibers, switched at barriers.
//
// Blocks run one after the other on the thread that launches; those of a function that take turns
// are there several at a time, and are switched where they take turns and at barriers of the block.
// Where threads never synchronise they are a loop. The order of threads, and of blocks, follows from
// the seed. Shared memory is filled with NaNs before each block. A deadlock within a block ends the
// program, and names the barriers that threads wait at; one of blocks is reported.
//
// Here is what texts see. They are many and each is compiled once, so that a compiler's time is
// theirs: bodies are here where texts are slow without them, and where they depend on types. All
// others, with the state, are in `host/`, which is compiled once and linked to each text. Headers
// are few for the same reason.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <sys/types.h>

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
#define TENSOR_MAP const TensorMap&
#define DYNAMIC_SHARED(NAME, BYTES) unsigned char* NAME = shim::dynamic_shared(BYTES)

// Libraries that are open side by side have functions and state of their own.
#pragma GCC visibility push(hidden)

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

// Of plain types, which no function initialises: texts read them where they stand.
extern __thread Index thread_index, block_index, block_size, grid_size;

// What each thread runs: it lives as long as a launch.
struct Body {
  void (*call)(const void*);
  const void* of;
  template <class F> Body(const F& f) : call([](const void* of) { (*(const F*)of)(); }), of(&f) {}
};

// Some of as many as the first seeds have one of, or few.
u_int64_t resident(u_int64_t all, u_int64_t seed);
// Runs a function on a grid.
void launch(u_int64_t blocks, unsigned int threads, bool synchronizes, u_int64_t seed, Body body);
// The same, where blocks take turns: of the blocks some are there at a time.
void launch_turns(u_int64_t blocks, unsigned int threads, u_int64_t seed, Body body);
// The same of tickets, which are taken by blocks that are far apart.
void launch_tickets(u_int64_t blocks, unsigned int threads, u_int64_t seed, Body body);
// The same of clusters: all blocks of one are there at a time.
void launch_clusters(u_int64_t blocks, unsigned int threads, unsigned int cluster, u_int64_t seed, Body body);
// Blocks of the launch share some bytes of a buffer by turns: accesses are looked at from now on.
void share(const void* start, size_t bytes);

// Reports a finding, if it is the first one.
__attribute__((format(printf, 1, 2))) void find(const char* format, ...);
// Ends the program.
[[noreturn]] void end_unaligned(const void* place, size_t bytes);

void* shared_array(const char* name, size_t before, size_t bytes);
unsigned char* dynamic_shared(size_t bytes);
void store_in_cluster(const void* place, unsigned int rank, const void* value, size_t bytes);

// Shows what the thread has to its warp, and finds what a lane shows, until all lanes have.
const void* show(const void* own, int lane);
void end_show();

// For what they count, accesses by a part are of an instruction, which is any address that is that
// part's alone.
void copy_async(void* to, const void* from, size_t bytes, bool is_there, const char instructions[2]);
void wait_for_copies(u_int64_t open);
void store_shared(void* to, const void* from, size_t bytes, const void* instruction);

void load_box(void* to, const TensorMap& map, const void* place, const int* coordinates, int count);
void store_box(const void* from, const TensorMap& map, const int* first, int count);
void set_registers(unsigned int count, bool more);
void wait_for_products(u_int64_t open);
void fence_products();

// Products of the types that tensor cores have: of registers of a warp, and by a warpgroup, of
// matrices in shared memory, of bytes there, and of registers and a matrix.
template <class A, class B>
void multiply_by_warp(float* c, const unsigned int* a, const unsigned int* b, int m, int n);
template <class T> void multiply_shared(float* c, int count, u_int64_t a, u_int64_t b, bool a_is_mn, bool b_is_mn);
template <class A, class B> void multiply_shared_bytes(float* c, int count, u_int64_t a, u_int64_t b);
template <class T> void multiply_fragments(float* c, int count, const unsigned int* a, u_int64_t b, bool b_is_mn);

}  // namespace shim

#define threadIdx shim::thread_index
#define blockIdx shim::block_index
#define blockDim shim::block_size
#define gridDim shim::grid_size

// ---- barriers, turns, and what a warp exchanges

// Launches follow each other.
inline void griddep_launch() {}
inline void griddep_wait() {}
void sync_block();
bool sync_block_or(bool says);
void wait_for_turn(const unsigned int* counter, unsigned int turn);
bool take_ticket(unsigned int* counter, unsigned int tickets);
void end_turn(unsigned int* counter, unsigned int next);
void sync_cluster();
template <class T> void store_in_cluster(T* place, unsigned int rank, T value) {
  shim::store_in_cluster(place, rank, &value, sizeof value);
}
void sync_warp();
// A shuffle does not order accesses to memory.
template <class T> T shuffle(T x, int lane) {
  T found = *(const T*)shim::show(&x, lane);
  shim::end_show();
  return found;
}
template <class T> T shuffle_xor(T x, int bits) { return shuffle(x, (int)(threadIdx.x % 32) ^ bits); }
unsigned int ballot(bool holds);
inline unsigned int bits_set(unsigned int x) { return (unsigned int)__builtin_popcount(x); }

template <class T, int N> struct Vector;
// At each place that they are called from they are instructions of its own.
#define ONE_PLACE inline __attribute__((always_inline))
template <class T, int N> ONE_PLACE Vector<T, N> load_vector(const T* from) {
  Vector<T, N> x;
  if ((uintptr_t)from % sizeof x) shim::end_unaligned(from, sizeof x);
  memcpy((void*)&x, from, sizeof x);
  return x;
}
template <class T, int N> ONE_PLACE void store_vector(T* to, const Vector<T, N>& x) {
  if ((uintptr_t)to % sizeof x) shim::end_unaligned(to, sizeof x);
  memcpy((void*)to, &x, sizeof x);
}

// ---- asynchronous copies to shared memory

template <int BYTES> void cp_async(void* to, const void* from, bool is_there) {
  static const char instructions[2] = {};
  shim::copy_async(to, from, BYTES, is_there, instructions);
}
void cp_async_commit();
template <int LAST> void cp_async_wait() { shim::wait_for_copies(LAST); }

// ---- tensor cores

void ldmatrix(unsigned int (&x)[4], const void* row);
void ldmatrix_trans(unsigned int (&x)[4], const void* row);

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

struct tf32;
struct f8e4m3;
struct f8e5m2;
inline float widened(f8e4m3 x);
inline float widened(f8e5m2 x);
inline void round_to_tf32(unsigned int& x) {
  if ((x & 0x7f800000u) != 0x7f800000u) x += 0x1000;
  x &= ~0x1fffu;
}

template <class A, class B = A, int M, int N>
void warp_mma(float (&c)[M][N][4], const unsigned int (&a)[M][4], const unsigned int (&b)[N / 2][4]) {
  shim::multiply_by_warp<A, B>(&c[0][0][0], &a[0][0], &b[0][0], M, N);
}

// ---- sm_90a: copies by TMA, mbarriers, and tensor cores of warpgroups

unsigned int shared_address(const void* place);
void mbarrier_init(unsigned long long* place, unsigned int arrivals);
void mbarrier_init_fence();
void mbarrier_expect(unsigned long long* place, unsigned int bytes);
void mbarrier_arrive(unsigned long long* place);
void mbarrier_wait(unsigned long long* place, unsigned int parity);
template <class... C> void tma_load(void* to, const TensorMap& map, unsigned long long* barrier, C... at) {
  int coordinates[] = {at...};
  shim::load_box(to, map, barrier, coordinates, sizeof...(at));
}
// What is fetched early is the same.
template <class... C> void tma_prefetch(const TensorMap& map, C...) {
  if ((size_t)map.count != sizeof...(C)) shim::find("a box has %zu coordinates", sizeof...(C));
}
template <class T, int N> void store_shared(void* to, const Vector<T, N>& x) {
  static const char instruction = 0;
  shim::store_shared(to, &x, sizeof x, &instruction);
}
void fence_proxy_async();
void sync_warpgroup(unsigned int barrier);
bool sync_warpgroup_or(unsigned int barrier, bool says);
template <class... C> void tma_store(const TensorMap& map, const void* from, C... at) {
  int coordinates[] = {at...};
  shim::store_box(from, map, coordinates, sizeof...(at));
}
void tma_store_commit();
void tma_store_wait();
void tma_store_numbers(float* to, const void* from, unsigned int bytes);
void tma_add_numbers(float* to, const void* from, unsigned int bytes);
void tma_store_end();
void fence_global_async();
template <int COUNT> void setmaxnreg_dec() { shim::set_registers(COUNT, false); }
template <int COUNT> void setmaxnreg_inc() { shim::set_registers(COUNT, true); }
template <class T> void keep_order(T&) {}
template <int N> void warpgroup_fence(float (&)[N]) { shim::fence_products(); }
void warpgroup_commit();
template <int LAST, int N> void warpgroup_wait(float (&)[N]) { shim::wait_for_products(LAST); }
template <class T, int A_MN, int B_MN, int COUNT>
void warpgroup_mma(float (&c)[COUNT], u_int64_t a, u_int64_t b) {
  shim::multiply_shared<T>(c, COUNT, a, b, A_MN, B_MN);
}
// The same of bytes: what is read are as many bytes of each row.
template <class A, class B, int COUNT>
void warpgroup_mma_bytes(float (&c)[COUNT], u_int64_t a, u_int64_t b) {
  shim::multiply_shared_bytes<A, B>(c, COUNT, a, b);
}
// Fragments too are read when the product is waited for: until then they must stay as they are.
template <class T, int B_MN, int COUNT>
void warpgroup_mma(float (&c)[COUNT], const unsigned int (&a)[4], u_int64_t b) {
  shim::multiply_fragments<T>(c, COUNT, a, b, B_MN);
}
