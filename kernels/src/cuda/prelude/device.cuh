// Parts as CUDA has them.

#define PART __device__ __forceinline__
#define KERNEL(THREADS) extern "C" __global__ void __launch_bounds__(THREADS, 1)
#define SHARED(T, NAME, COUNT) __shared__ T NAME[COUNT]
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
