// Parts as CUDA has them.

// Text names each value of a program once, whether all are used or not.
#pragma nv_diag_suppress 177
#pragma nv_diag_suppress 550

#define PART __device__ __forceinline__
// One block a multiprocessor is enough: for more of them registers would be spilled.
#define KERNEL(THREADS) extern "C" __global__ void __launch_bounds__(THREADS, 1)
#define SHARED(T, NAME, COUNT) __shared__ __align__(128) T NAME[COUNT]
#define UNROLL _Pragma("unroll")
#define TABLE static __device__ const

PART float float_of_bits(unsigned int bits) { return __uint_as_float(bits); }
PART unsigned int bits_of(float x) { return __float_as_uint(x); }
PART double double_of_bits(unsigned long long bits) { return __longlong_as_double((long long)bits); }

// All threads of the block have come here, and see what the others wrote.
PART void meet_block() { __syncthreads(); }
// All lanes of the warp have.
PART void meet_warp() { __syncwarp(); }
// The value of the lane whose number differs in these bits.
template <class T> PART T swapped(T x, int bits) { return __shfl_xor_sync(0xffffffffu, x, bits); }
// The value of a lane.
template <class T> PART T of_lane(T x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }

// Elements that lie side by side and are aligned together.
template <class T, int N> struct Wide;
template <class T, int N> PART Wide<T, N> load_wide(const T* from) {
  Wide<T, N> x;
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
template <class T, int N> PART void store_wide(T* to, const Wide<T, N>& x) {
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

// ---- sm_80: copies to shared memory that run beside the program, and products of matrices

PART unsigned int shared_address(const void* place) {
  return (unsigned int)__cvta_generic_to_shared(place);
}
// Begins to copy bytes, or as many zeros. Whoever waits for it sees it; others once they meet too.
template <int BYTES> PART void copy_early(void* to, const void* from, bool is_there) {
  int size = is_there ? BYTES : 0;
  if (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
                 "l"(from), "r"(size) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(to)),
                 "l"(from), "n"(BYTES), "r"(size) : "memory");
  }
}
// What a thread has begun to copy since the last time is one group.
PART void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// All groups of the thread but the last ones are done.
template <int LAST> PART void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LAST) : "memory");
}
// Loads four matrices of 8 rows of 16 bytes; lane `8 m + r` names row `r` of matrix `m`, and has of
// each elements `2 (lane % 4)` and the next of row `lane / 4`.
PART void load_matrices(unsigned int (&x)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(shared_address(row)) : "memory");
}
// The same of matrices whose rows become columns.
PART void load_turned(unsigned int (&x)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(shared_address(row)) : "memory");
}
struct bf16;
struct f16;
template <class T> struct Multiply;
template <> struct Multiply<bf16> {
  static PART void add(float (&c)[4], const unsigned int (&a)[4], unsigned int b0, unsigned int b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};
template <> struct Multiply<f16> {
  static PART void add(float (&c)[4], const unsigned int (&a)[4], unsigned int b0, unsigned int b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};
// Adds the product of a warp's matrices, 16 deep, to its sums.
template <class T, int M, int N>
PART void warp_multiply(float (&c)[M][N][4], const unsigned int (&a)[M][4],
                        const unsigned int (&b)[N / 2][4]) {
  UNROLL
  for (int i = 0; i < M; i += 1) {
    UNROLL
    for (int j = 0; j < N; j += 1) {
      Multiply<T>::add(c[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
    }
  }
}
