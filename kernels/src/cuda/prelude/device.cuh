// The prelude for GPUs.

// Text declares each value of a program, used or not.
#pragma nv_diag_suppress 177
#pragma nv_diag_suppress 550

#define PART __device__ __forceinline__
// One block per multiprocessor is enough: for more of them registers would be spilled.
#define KERNEL(THREADS) extern "C" __global__ void __launch_bounds__(THREADS, 1)
// The same, of which so many blocks are a cluster.
#define KERNEL_OF_CLUSTERS(THREADS, BLOCKS) KERNEL(THREADS) __cluster_dims__(BLOCKS, 1, 1)
#define SHARED(T, NAME, COUNT) __shared__ __align__(128) T NAME[COUNT]
#define UNROLL _Pragma("unroll")
#define UNROLL_4 _Pragma("unroll 4")
#define NO_UNROLL _Pragma("unroll 1")
#define TABLE static __device__ const

PART float float_of_bits(unsigned int bits) { return __uint_as_float(bits); }
PART unsigned int bits_of(float x) { return __float_as_uint(x); }
PART double double_of_bits(unsigned long long bits) { return __longlong_as_double((long long)bits); }

// Numbers of BF16 and F16, to nearest, ties to even; of what is no number another one. F2FP and
// HADD2 instead of several operations on integers each.
PART unsigned short bf16_bits(float x) {
  unsigned short bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
PART unsigned short f16_bits(float x) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
PART float f16_number(unsigned short bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}
// The larger and the smaller number, or what is no number.
PART float larger_or_nan(float a, float b) {
  float x;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b));
  return x;
}
PART float smaller_or_nan(float a, float b) {
  float x;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b));
  return x;
}
// The reciprocal of a number between 2^-126 and 2^126: what a division of one by it does there,
// without the test for others, whose branch keeps the elements of a thread one after the other.
PART float normal_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return fmaf(y, -fmaf(y, x, -1.0f), y);
}

// A number of which the compiler knows nothing.
PART unsigned int opaque(unsigned int x) { asm volatile("" : "+r"(x)); return x; }

// Lets the launch after it start: its blocks, as soon as there is room beside those of this one.
PART void griddep_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Waits until the launches before it have ended, and what they wrote is seen: where it is launched
// before they have.
PART void griddep_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
PART void sync_block() { __syncthreads(); }
// The same, and whether a thread of the block says so.
PART bool sync_block_or(bool says) { return __syncthreads_or(says); }
PART void sync_warp() { __syncwarp(); }
// Waits until a counter in global memory is the number of a turn: what was written before the turn
// before that ended is visible to the thread, and to others after a barrier.
PART void wait_for_turn(const unsigned int* counter, unsigned int turn) {
  unsigned int now;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now)
                 : "l"(__cvta_generic_to_global(counter)) : "memory");
  } while (now != turn);
}
// Ends a turn: the next one is that of the number. What threads wrote before the last barrier is
// visible to who waits for it.
PART void end_turn(unsigned int* counter, unsigned int next) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(counter)),
               "r"(next) : "memory");
}
// Takes a ticket of some that a counter in global memory counts, and whether it is the last one, which
// begins anew. What threads wrote before the last barrier is visible to who takes a later ticket,
// and to others after a barrier.
PART bool take_ticket(unsigned int* counter, unsigned int tickets) {
  unsigned int before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before)
               : "l"(__cvta_generic_to_global(counter)), "r"(tickets - 1) : "memory");
  return before == tickets - 1;
}
// What blocks of a cluster do: there are clusters from sm_90 on.
#if __CUDA_ARCH__ >= 900
// Waits for all threads of the cluster: what they wrote before, also to each other's shared memory,
// is visible behind it.
PART void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Stores to the same place of shared memory in the block of a number.
template <class T> PART void store_in_cluster(T* place, unsigned int rank, T value) {
  unsigned int there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there)
               : "r"((unsigned int)__cvta_generic_to_shared(place)), "r"(rank));
  if (sizeof value == 8) {
    unsigned long long bits;
    memcpy(&bits, &value, sizeof value);
    asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(there), "l"(bits) : "memory");
  } else {
    unsigned int bits;
    memcpy(&bits, &value, sizeof value);
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(there), "r"(bits) : "memory");
  }
}
#endif
// The value of the lane whose number differs in `bits`.
template <class T> PART T shuffle_xor(T x, int bits) { return __shfl_xor_sync(0xffffffffu, x, bits); }
template <class T> PART T shuffle(T x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
// Whether it holds of each lane, a bit per lane: all lanes of the warp take part.
PART unsigned int ballot(bool holds) { return __ballot_sync(0xffffffffu, holds); }
PART unsigned int bits_set(unsigned int x) { return __popc(x); }

// Vectors: adjacent elements, aligned to their size.
template <class T, int N> struct Vector;
template <class T, int N> PART Vector<T, N> load_vector(const T* from) {
  Vector<T, N> x;
  if (sizeof x == 16) {
    uint4 bits = *(const uint4*)from;
    memcpy(&x, &bits, sizeof x);
  } else if (sizeof x == 8) {
    uint2 bits = *(const uint2*)from;
    memcpy(&x, &bits, sizeof x);
  } else if (sizeof x == 4) {
    unsigned int bits = *(const unsigned int*)from;
    memcpy(&x, &bits, sizeof x);
  } else {
    unsigned short bits = *(const unsigned short*)from;
    memcpy(&x, &bits, sizeof x);
  }
  return x;
}
template <class T, int N> PART void store_vector(T* to, const Vector<T, N>& x) {
  if (sizeof x == 16) {
    uint4 bits;
    memcpy(&bits, &x, sizeof x);
    *(uint4*)to = bits;
  } else if (sizeof x == 8) {
    uint2 bits;
    memcpy(&bits, &x, sizeof x);
    *(uint2*)to = bits;
  } else if (sizeof x == 4) {
    unsigned int bits;
    memcpy(&bits, &x, sizeof x);
    *(unsigned int*)to = bits;
  } else {
    unsigned short bits;
    memcpy(&bits, &x, sizeof x);
    *(unsigned short*)to = bits;
  }
}

// ---- sm_80: asynchronous copies to shared memory, and tensor cores

PART unsigned int shared_address(const void* place) {
  return (unsigned int)__cvta_generic_to_shared(place);
}
// Copies BYTES, or zeros: visible to the thread after cp_async_wait, to others after a barrier too.
template <int BYTES> PART void cp_async(void* to, const void* from, bool is_there) {
  int size = is_there ? BYTES : 0;
  if (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
                 "l"(from), "r"(size) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(to)),
                 "l"(from), "n"(BYTES), "r"(size) : "memory");
  }
}
// Ends a group of copies.
PART void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for all groups of the thread but the last ones.
template <int LAST> PART void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LAST) : "memory");
}
// Loads four 8 x 8 matrices. Lane `8 m + r` gives the address of row `r` of matrix `m`, and receives
// of each matrix the elements `2 (lane % 4)` and the next of row `lane / 4`.
PART void ldmatrix(unsigned int (&x)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(shared_address(row)) : "memory");
}
// The same, transposed.
PART void ldmatrix_trans(unsigned int (&x)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(shared_address(row)) : "memory");
}
struct bf16;
struct f16;
struct tf32;
struct f8e4m3;
struct f8e5m2;
// A step of 32 bytes along k: c += a b for 16 x 8 accumulators.
template <class A, class B> struct Mma;
#define MMA(A, B, STEP, TYPES)                                                        \
  template <> struct Mma<A, B> {                                                      \
    static PART void of(float (&c)[4], const unsigned int (&a)[4], unsigned int b0, unsigned int b1) { \
      asm volatile("mma.sync.aligned.m16n8" STEP ".row.col.f32." TYPES ".f32 {%0, %1, %2, %3}, " \
                   "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                    \
                   : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                   \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));   \
    }                                                                                 \
  };
MMA(bf16, bf16, "k16", "bf16.bf16")
MMA(f16, f16, "k16", "f16.f16")
MMA(tf32, tf32, "k8", "tf32.tf32")
MMA(f8e4m3, f8e4m3, "k32", "e4m3.e4m3")
MMA(f8e4m3, f8e5m2, "k32", "e4m3.e5m2")
MMA(f8e5m2, f8e4m3, "k32", "e5m2.e4m3")
MMA(f8e5m2, f8e5m2, "k32", "e5m2.e5m2")
// A number of f32, rounded to 10 bits of the mantissa: to nearest, ties away from zero.
PART void round_to_tf32(unsigned int& x) { asm("cvt.rna.tf32.f32 %0, %0;" : "+r"(x)); }
// Two elements of a register, rounded.
template <class T> PART unsigned int packed(float low, float high);
template <> PART unsigned int packed<bf16>(float low, float high) {
  unsigned int x;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  return x;
}
template <> PART unsigned int packed<f16>(float low, float high) {
  unsigned int x;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  return x;
}
// Within 2 ulp.
PART float ex2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
PART float rcp_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// c += a b for the fragments of a warp tile of 16 M x 8 N, and a step of 32 bytes along k.
template <class A, class B = A, int M, int N>
PART void warp_mma(float (&c)[M][N][4], const unsigned int (&a)[M][4],
                        const unsigned int (&b)[N / 2][4]) {
  UNROLL
  for (int i = 0; i < M; i += 1) {
    UNROLL
    for (int j = 0; j < N; j += 1) {
      Mma<A, B>::of(c[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
    }
  }
}

// ---- sm_90a: copies by TMA, mbarriers, and tensor cores of warpgroups

// What cuTensorMapEncodeTiled writes.
struct alignas(64) TensorMap { unsigned long long opaque[16]; };
#define TENSOR_MAP const __grid_constant__ TensorMap
// The launch gives that many bytes. Swizzles repeat after 1024 bytes.
#define DYNAMIC_SHARED(NAME, BYTES) extern __shared__ __align__(1024) unsigned char NAME[]

PART void mbarrier_init(unsigned long long* barrier, unsigned int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals) : "memory");
}
// Makes barriers that the thread has initialised known to TMA.
PART void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Arrives, and has the phase wait for that many bytes of copies.
PART void mbarrier_expect(unsigned long long* barrier, unsigned int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}
PART void mbarrier_arrive(unsigned long long* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Waits until the phase of that parity is complete.
PART void mbarrier_wait(unsigned long long* barrier, unsigned int parity) {
  asm volatile("{\n.reg .pred done;\nAGAIN:\n"
               "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
               "@!done bra AGAIN;\n}" ::"r"(shared_address(barrier)), "r"(parity) : "memory");
}
// Copies a box, with zeros out of bounds; its bytes complete a phase of the barrier.
PART void tma_load(void* to, const TensorMap& map, unsigned long long* barrier, int x0, int x1) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile"
               ".mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
               ::"r"(shared_address(to)), "l"(&map), "r"(shared_address(barrier)),
               "r"(x0), "r"(x1) : "memory");
}
PART void tma_load(void* to, const TensorMap& map, unsigned long long* barrier, int x0, int x1, int x2) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile"
               ".mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
               ::"r"(shared_address(to)), "l"(&map), "r"(shared_address(barrier)),
               "r"(x0), "r"(x1), "r"(x2) : "memory");
}
PART void tma_load(void* to, const TensorMap& map, unsigned long long* barrier, int x0, int x1, int x2, int x3) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile"
               ".mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
               ::"r"(shared_address(to)), "l"(&map), "r"(shared_address(barrier)),
               "r"(x0), "r"(x1), "r"(x2), "r"(x3) : "memory");
}
PART void tma_load(void* to, const TensorMap& map, unsigned long long* barrier, int x0, int x1, int x2, int x3, int x4) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile"
               ".mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], [%2];"
               ::"r"(shared_address(to)), "l"(&map), "r"(shared_address(barrier)),
               "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4) : "memory");
}
// Stores a vector to shared memory.
template <class T, int N> PART void store_shared(void* to, const Vector<T, N>& x) {
  store_vector((T*)to, x);
}
// Makes what the thread has written to shared memory known to TMA.
PART void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Waits for the other threads of a warpgroup, which has a barrier of its own: from 1 on.
PART void sync_warpgroup(unsigned int barrier) {
  asm volatile("bar.sync %0, 128;" ::"r"(barrier) : "memory");
}
// The same, and whether one of them says so.
PART bool sync_warpgroup_or(unsigned int barrier, bool says) {
  unsigned int any;
  asm volatile("{\n.reg .pred says, any;\nsetp.ne.u32 says, %2, 0;\n"
               "barrier.cta.red.or.pred any, %1, 128, says;\nselp.u32 %0, 1, 0, any;\n}"
               : "=r"(any) : "r"(barrier), "r"((unsigned int)says) : "memory");
  return any;
}
// Fetches a box to the L2 cache, but for what is out of bounds.
PART void tma_prefetch(const TensorMap& map, int x0, int x1) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];"
               ::"l"(&map), "r"(x0), "r"(x1) : "memory");
}
PART void tma_prefetch(const TensorMap& map, int x0, int x1, int x2) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];"
               ::"l"(&map), "r"(x0), "r"(x1), "r"(x2) : "memory");
}
PART void tma_prefetch(const TensorMap& map, int x0, int x1, int x2, int x3) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];"
               ::"l"(&map), "r"(x0), "r"(x1), "r"(x2), "r"(x3) : "memory");
}
PART void tma_prefetch(const TensorMap& map, int x0, int x1, int x2, int x3, int x4) {
  asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global.tile [%0, {%1, %2, %3, %4, %5}];"
               ::"l"(&map), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4) : "memory");
}
// Stores a box, but for what is out of bounds.
PART void tma_store(const TensorMap& map, const void* from, int x0, int x1) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];"
               ::"l"(&map), "r"(shared_address(from)), "r"(x0), "r"(x1) : "memory");
}
PART void tma_store(const TensorMap& map, const void* from, int x0, int x1, int x2) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];"
               ::"l"(&map), "r"(shared_address(from)), "r"(x0), "r"(x1), "r"(x2) : "memory");
}
PART void tma_store(const TensorMap& map, const void* from, int x0, int x1, int x2, int x3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
               ::"l"(&map), "r"(shared_address(from)), "r"(x0), "r"(x1), "r"(x2), "r"(x3) : "memory");
}
PART void tma_store(const TensorMap& map, const void* from, int x0, int x1, int x2, int x3, int x4) {
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];"
               ::"l"(&map), "r"(shared_address(from)), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4) : "memory");
}
// Ends a group of stores of the thread.
PART void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until the thread's stores that are in groups have read shared memory.
PART void tma_store_wait() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// Starts to store numbers to global memory, or to add them to those there: whole vectors of 16 bytes.
// One after the other, additions are those of atomic ones: of subnormal numbers none is kept.
PART void tma_store_numbers(float* to, const void* from, unsigned int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
               ::"l"(__cvta_generic_to_global(to)), "r"(shared_address(from)), "r"(bytes) : "memory");
}
PART void tma_add_numbers(float* to, const void* from, unsigned int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
               ::"l"(__cvta_generic_to_global(to)), "r"(shared_address(from)), "r"(bytes) : "memory");
}
// Waits until the thread's stores and additions that are in groups are done.
PART void tma_store_end() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// Orders accesses to global memory by TMA and by the thread.
PART void fence_global_async() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
// Registers of each thread of a warpgroup: fewer, or more.
template <int COUNT> PART void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> PART void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
// The compiler moves no access to registers past this.
template <int N> PART void keep_order(float (&c)[N]) {
  UNROLL
  for (int i = 0; i < N; i += 1) asm volatile("" : "+f"(c[i])::"memory");
}
template <int N> PART void keep_order(unsigned int (&a)[N][4]) {
  UNROLL
  for (int i = 0; i < 4 * N; i += 1) asm volatile("" : "+r"(a[i / 4][i % 4])::"memory");
}
// Orders accesses to accumulators before the next instruction that reads and writes them.
template <int N> PART void warpgroup_fence(float (&c)[N]) {
  keep_order(c);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
PART void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits for all groups but the last ones; accumulators are then valid.
template <int LAST, int N> PART void warpgroup_wait(float (&c)[N]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LAST) : "memory");
  if (LAST == 0) keep_order(c);
}
#define ACC8(I)                                                                       \
  "+f"(c[I]), "+f"(c[I + 1]), "+f"(c[I + 2]), "+f"(c[I + 3]), "+f"(c[I + 4]), "+f"(c[I + 5]), \
      "+f"(c[I + 6]), "+f"(c[I + 7])
#define ACC32 ACC8(0), ACC8(8), ACC8(16), ACC8(24)
#define ACC64 ACC32, ACC8(32), ACC8(40), ACC8(48), ACC8(56)
#define REG8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define REG32                                                                         \
  REG8 ", %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
       "%24, %25, %26, %27, %28, %29, %30, %31"
#define REG64                                                                         \
  REG32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
// Products for accumulators of 64 x COLUMNS, of which each thread has COUNT; SHARED and REGISTERS
// number the operands behind those: of two matrices in shared memory, and of one in registers.
template <class T, int COUNT> struct WarpgroupMma;
#define WARPGROUP_MMA(T, TYPE, COLUMNS, COUNT, ACC, REG, OF_SHARED, OF_REGISTERS)     \
  template <> struct WarpgroupMma<T, COUNT> {                                         \
    template <int A_MN, int B_MN>                                                     \
    static PART void of(float (&c)[COUNT], unsigned long long a, unsigned long long b) { \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" COLUMNS "k16.f32." TYPE "." TYPE \
                   " {" REG "}, " OF_SHARED ";" : ACC : "l"(a), "l"(b), "n"(A_MN), "n"(B_MN)); \
    }                                                                                 \
    template <int B_MN>                                                               \
    static PART void of(float (&c)[COUNT], const unsigned int (&a)[4], unsigned long long b) { \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" COLUMNS "k16.f32." TYPE "." TYPE \
                   " {" REG "}, " OF_REGISTERS ";" : ACC                              \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(B_MN));  \
    }                                                                                 \
  };
#define WARPGROUP_MMAS(T, TYPE)                                                       \
  WARPGROUP_MMA(T, TYPE, "16", 8, ACC8(0), REG8, "%8, %9, 1, 1, 1, %10, %11",         \
                "{%8, %9, %10, %11}, %12, 1, 1, 1, %13")                              \
  WARPGROUP_MMA(T, TYPE, "64", 32, ACC32, REG32, "%32, %33, 1, 1, 1, %34, %35",       \
                "{%32, %33, %34, %35}, %36, 1, 1, 1, %37")                            \
  WARPGROUP_MMA(T, TYPE, "128", 64, ACC64, REG64, "%64, %65, 1, 1, 1, %66, %67",      \
                "{%64, %65, %66, %67}, %68, 1, 1, 1, %69")
WARPGROUP_MMAS(bf16, "bf16")
WARPGROUP_MMAS(f16, "f16")
// The same of bytes, for k of 32: both matrices are K-major.
template <class A, class B, int COUNT> struct WarpgroupMmaBytes;
#define WARPGROUP_MMA_BYTES(A, B, TYPES, COLUMNS, COUNT, ACC, REG, OPERANDS)          \
  template <> struct WarpgroupMmaBytes<A, B, COUNT> {                                 \
    static PART void of(float (&c)[COUNT], unsigned long long a, unsigned long long b) { \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" COLUMNS "k32.f32." TYPES       \
                   " {" REG "}, " OPERANDS ";" : ACC : "l"(a), "l"(b));               \
    }                                                                                 \
  };
#define WARPGROUP_MMAS_BYTES(A, B, TYPES)                                             \
  WARPGROUP_MMA_BYTES(A, B, TYPES, "16", 8, ACC8(0), REG8, "%8, %9, 1, 1, 1")         \
  WARPGROUP_MMA_BYTES(A, B, TYPES, "128", 64, ACC64, REG64, "%64, %65, 1, 1, 1")
WARPGROUP_MMAS_BYTES(f8e4m3, f8e4m3, "e4m3.e4m3")
WARPGROUP_MMAS_BYTES(f8e4m3, f8e5m2, "e4m3.e5m2")
WARPGROUP_MMAS_BYTES(f8e5m2, f8e4m3, "e5m2.e4m3")
WARPGROUP_MMAS_BYTES(f8e5m2, f8e5m2, "e5m2.e5m2")
template <class A, class B, int COUNT>
PART void warpgroup_mma_bytes(float (&c)[COUNT], unsigned long long a, unsigned long long b) {
  WarpgroupMmaBytes<A, B, COUNT>::of(c, a, b);
}
// c += a b for 64 x 2 COUNT accumulators of a warpgroup, and k of 16, of matrices that descriptors
// name. An operand whose rows are along m or n is MN-major.
template <class T, int A_MN, int B_MN, int COUNT>
PART void warpgroup_mma(float (&c)[COUNT], unsigned long long a, unsigned long long b) {
  WarpgroupMma<T, COUNT>::template of<A_MN, B_MN>(c, a, b);
}
// The same, of fragments of a: those of mma.sync, of the 16 rows of each warp.
template <class T, int B_MN, int COUNT>
PART void warpgroup_mma(float (&c)[COUNT], const unsigned int (&a)[4], unsigned long long b) {
  WarpgroupMma<T, COUNT>::template of<B_MN>(c, a, b);
}
