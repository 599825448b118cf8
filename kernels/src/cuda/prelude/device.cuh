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
