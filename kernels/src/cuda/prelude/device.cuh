// The prelude for GPUs.

// Text declares each value of a program, used or not.
#pragma nv_diag_suppress 177
#pragma nv_diag_suppress 550

#define PART __device__ __forceinline__
// One block per multiprocessor is enough: for more of them registers would be spilled.
#define KERNEL(THREADS) extern "C" __global__ void __launch_bounds__(THREADS, 1)
#define SHARED(T, NAME, COUNT) __shared__ __align__(128) T NAME[COUNT]
#define UNROLL _Pragma("unroll")
#define NO_UNROLL _Pragma("unroll 1")
#define TABLE static __device__ const

PART float float_of_bits(unsigned int bits) { return __uint_as_float(bits); }
PART unsigned int bits_of(float x) { return __float_as_uint(x); }
PART double double_of_bits(unsigned long long bits) { return __longlong_as_double((long long)bits); }

PART void sync_block() { __syncthreads(); }
PART void sync_warp() { __syncwarp(); }
// The value of the lane whose number differs in `bits`.
template <class T> PART T shuffle_xor(T x, int bits) { return __shfl_xor_sync(0xffffffffu, x, bits); }
template <class T> PART T shuffle(T x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }

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
template <class T> struct Mma;
template <> struct Mma<bf16> {
  static PART void m16n8k16(float (&c)[4], const unsigned int (&a)[4], unsigned int b0, unsigned int b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};
template <> struct Mma<f16> {
  static PART void m16n8k16(float (&c)[4], const unsigned int (&a)[4], unsigned int b0, unsigned int b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};
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
// c += a b for the fragments of a warp tile of 16 M x 8 N, and k of 16.
template <class T, int M, int N>
PART void warp_mma(float (&c)[M][N][4], const unsigned int (&a)[M][4],
                        const unsigned int (&b)[N / 2][4]) {
  UNROLL
  for (int i = 0; i < M; i += 1) {
    UNROLL
    for (int j = 0; j < N; j += 1) {
      Mma<T>::m16n8k16(c[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
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
// Registers of each thread of a warpgroup: fewer, or more.
template <int COUNT> PART void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> PART void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
// The compiler moves no access to accumulators past this.
PART void keep_order(float (&c)[64]) {
  UNROLL
  for (int i = 0; i < 64; i += 1) asm volatile("" : "+f"(c[i])::"memory");
}
// Orders accesses to accumulators before the next instruction that reads and writes them.
PART void warpgroup_fence(float (&c)[64]) {
  keep_order(c);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
PART void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits for all groups but the last ones; accumulators are then valid.
template <int LAST> PART void warpgroup_wait(float (&c)[64]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LAST) : "memory");
  if (LAST == 0) keep_order(c);
}
template <class T, int A_MN, int B_MN> struct WarpgroupMma;
template <int A_MN, int B_MN> struct WarpgroupMma<bf16, A_MN, B_MN> {
  static PART void m64n128k16(float (&c)[64], unsigned long long a, unsigned long long b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
                 "%64, %65, 1, 1, 1, %66, %67;"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]),
                   "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]),
                   "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]),
                   "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31]),
                   "+f"(c[32]), "+f"(c[33]), "+f"(c[34]), "+f"(c[35]), "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]),
                   "+f"(c[40]), "+f"(c[41]), "+f"(c[42]), "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]),
                   "+f"(c[48]), "+f"(c[49]), "+f"(c[50]), "+f"(c[51]), "+f"(c[52]), "+f"(c[53]), "+f"(c[54]), "+f"(c[55]),
                   "+f"(c[56]), "+f"(c[57]), "+f"(c[58]), "+f"(c[59]), "+f"(c[60]), "+f"(c[61]), "+f"(c[62]), "+f"(c[63])
                 : "l"(a), "l"(b), "n"(A_MN), "n"(B_MN));
  }
};
template <int A_MN, int B_MN> struct WarpgroupMma<f16, A_MN, B_MN> {
  static PART void m64n128k16(float (&c)[64], unsigned long long a, unsigned long long b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
                 "%64, %65, 1, 1, 1, %66, %67;"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]),
                   "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]),
                   "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]),
                   "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31]),
                   "+f"(c[32]), "+f"(c[33]), "+f"(c[34]), "+f"(c[35]), "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]),
                   "+f"(c[40]), "+f"(c[41]), "+f"(c[42]), "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]),
                   "+f"(c[48]), "+f"(c[49]), "+f"(c[50]), "+f"(c[51]), "+f"(c[52]), "+f"(c[53]), "+f"(c[54]), "+f"(c[55]),
                   "+f"(c[56]), "+f"(c[57]), "+f"(c[58]), "+f"(c[59]), "+f"(c[60]), "+f"(c[61]), "+f"(c[62]), "+f"(c[63])
                 : "l"(a), "l"(b), "n"(A_MN), "n"(B_MN));
  }
};
// c += a b for 64 x 128 accumulators of a warpgroup, and k of 16, of matrices that descriptors name.
// An operand whose rows are along m or n is MN-major.
template <class T, int A_MN, int B_MN>
PART void warpgroup_mma(float (&c)[64], unsigned long long a, unsigned long long b) {
  WarpgroupMma<T, A_MN, B_MN>::m64n128k16(c, a, b);
}
