// What both preludes share: element types, conversions, elementary functions, draws.
//
// The functions of f32 are the polynomials of the CPU (kernels/src/cpu/math.rs), rounded where they
// are, so that maps have the same bits. Neither compiler may contract `a * b + c`.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

struct bf16 { u16 bits; };
struct f16 { u16 bits; };
struct f8e4m3 { u8 bits; };
struct f8e5m2 { u8 bits; };
struct truth { u8 bits; };

PART truth byte(u8 bits) { truth x; x.bits = bits; return x; }

template <class T> PART bool is_nan(T x) { return x != x; }

// ---- narrow types, to f32: exact

PART float tf32_of(float x) {
  unsigned int bits = bits_of(x);
  round_to_tf32(bits);
  return float_of_bits(bits);
}
PART float widened(bf16 x) { return float_of_bits((u32)x.bits << 16); }
PART float widened(f16 x) { return f16_number(x.bits); }
PART float widened(f8e4m3 x) {
  u32 sign = (u32)(x.bits & 0x80) << 24, exponent = x.bits >> 3 & 15, mantissa = x.bits & 7;
  if (exponent == 0) return float_of_bits(sign | bits_of((float)mantissa * 0.001953125f));
  if ((x.bits & 0x7f) == 0x7f) return float_of_bits(sign | 0x7fc00000);
  return float_of_bits(sign | (exponent + 120) << 23 | mantissa << 20);
}
PART float widened(f8e5m2 x) { f16 wide; wide.bits = (u16)(x.bits << 8); return widened(wide); }

template <class T, int N> struct Vector { T x[N]; };

// Copies an element, or zero.
template <class T> PART void copy_element(T* to, const T* from, bool is_there) {
  T zero = {};
  *to = is_there ? *from : zero;
}

// ---- narrow types, from f32: to nearest, ties to even

// Of a format whose smallest normal number is `low`, whose subnormal ones are the spacing of
// numbers at `magic`, and that keeps all but `dropped` bits of the mantissa.
PART u32 rounded_bits(u32 magnitude, u32 low, u32 magic, u32 bias, u32 dropped) {
  if (magnitude < low) {
    return bits_of(float_of_bits(magnitude) + float_of_bits(magic)) - magic;
  }
  u32 even = magnitude >> dropped & 1;
  return (magnitude + ((1u << (dropped - 1)) - 1) + even - bias) >> dropped;
}
PART u8 f8e5m2_bits(float x) {
  u32 u = bits_of(x), sign = u >> 24 & 0x80, a = u & 0x7fffffff;
  if (a > 0x7f800000) return (u8)(sign | 0x7f);
  if (a >= 0x47700000) return (u8)(sign | 0x7c);
  return (u8)(sign | rounded_bits(a, 0x38800000, 0x43000000, 0x38000000, 21));
}
PART u8 f8e4m3_bits(float x) {
  u32 u = bits_of(x), sign = u >> 24 & 0x80, a = u & 0x7fffffff;
  if (a > 0x43e80000) return (u8)(sign | 0x7f);
  return (u8)(sign | rounded_bits(a, 0x3c800000, 0x46800000, 0x3c000000, 20));
}

// The number of f32 that rounds to any narrower type as `x` does (rounding to odd).
PART float sticky(float x) { return x; }
PART float sticky(double x) {
  float near = (float)x;
  if ((double)near == x || is_nan(x)) return near;
  u32 beyond = fabs((double)near) > fabs(x);
  return float_of_bits((bits_of(near) - beyond) | 1);
}
PART float sticky(i64 x) {
  u64 magnitude = x < 0 ? 0 - (u64)x : (u64)x;
  u64 kept = magnitude;
  int lost = 0;
  while (kept >> 53) { kept >>= 1; lost += 1; }
  if (kept << lost != magnitude) kept |= 1;
  double wide = (double)kept * (double)(1u << lost);
  return sticky(x < 0 ? -wide : wide);
}

// ---- any element, as the type that is computed in

PART double number(float x) { return x; }
PART double number(double x) { return x; }
PART double number(i32 x) { return x; }
PART double number(u32 x) { return x; }
PART double number(i64 x) { return (double)x; }
PART double number(truth x) { return x.bits != 0; }
PART double number(bf16 x) { return widened(x); }
PART double number(f16 x) { return widened(x); }
PART double number(f8e4m3 x) { return widened(x); }
PART double number(f8e5m2 x) { return widened(x); }

// Towards zero, within the type; zero of what is no number.
PART i64 whole(double x) {
  if (is_nan(x)) return 0;
  if (x >= 9223372036854775808.0) return 0x7fffffffffffffffLL;
  if (x <= -9223372036854775808.0) return (i64)0x8000000000000000ULL;
  return (i64)x;
}
PART i32 whole_i32(double x) {
  i64 at = whole(x);
  return at > 2147483647 ? 2147483647 : at < -2147483647 - 1 ? -2147483647 - 1 : (i32)at;
}
PART u32 whole_u32(double x) {
  i64 at = whole(x);
  return at > 4294967295LL ? 0xffffffffu : at < 0 ? 0u : (u32)at;
}

template <class C> struct Load;
template <> struct Load<float> {
  template <class T> static PART float of(T x) { return (float)number(x); }
  static PART float of(float x) { return x; }
  static PART float of(bf16 x) { return widened(x); }
  static PART float of(f16 x) { return widened(x); }
};
template <> struct Load<double> {
  template <class T> static PART double of(T x) { return number(x); }
};
template <> struct Load<i64> {
  template <class T> static PART i64 of(T x) { return whole(number(x)); }
  static PART i64 of(i64 x) { return x; }
  static PART i64 of(i32 x) { return x; }
  static PART i64 of(u32 x) { return x; }
};

template <class T> struct Store;
template <> struct Store<float> { template <class C> static PART float of(C x) { return (float)x; } };
template <> struct Store<double> {
  template <class C> static PART double of(C x) { return (double)x; }
};
template <> struct Store<i64> {
  template <class C> static PART i64 of(C x) { return whole((double)x); }
  static PART i64 of(i64 x) { return x; }
};
template <> struct Store<i32> {
  template <class C> static PART i32 of(C x) { return whole_i32((double)x); }
  static PART i32 of(i64 x) { return (i32)(u32)(u64)x; }
};
template <> struct Store<u32> {
  template <class C> static PART u32 of(C x) { return whole_u32((double)x); }
  static PART u32 of(i64 x) { return (u32)(u64)x; }
};
template <> struct Store<truth> {
  template <class C> static PART truth of(C x) { truth t; t.bits = x != (C)0; return t; }
};
template <> struct Store<bf16> {
  template <class C> static PART bf16 of(C x) { bf16 t; t.bits = bf16_bits(sticky(x)); return t; }
};
template <> struct Store<f16> {
  template <class C> static PART f16 of(C x) { f16 t; t.bits = f16_bits(sticky(x)); return t; }
};
template <> struct Store<f8e4m3> {
  template <class C> static PART f8e4m3 of(C x) {
    f8e4m3 t;
    t.bits = f8e4m3_bits(sticky(x));
    return t;
  }
};
template <> struct Store<f8e5m2> {
  template <class C> static PART f8e5m2 of(C x) {
    f8e5m2 t;
    t.bits = f8e5m2_bits(sticky(x));
    return t;
  }
};

// The nearest number of a type, as a number of the type that is computed in.
template <class T, class C> PART C rounded(C x) { return (C)number(Store<T>::of(x)); }

// ---- elementary functions of f32, and those of f64 that have the same names

// The exponential of `x` is `mantissa 2^n` for an integer `n`, which is below 2^21 in magnitude.
// `n` is rounded by adding 1.5 * 2^23, whose spacing is one: the sum's last bits are those of `n`,
// which conversions between types, at a quarter of the rate of additions, would take apart.
struct Exponential { float mantissa; i32 n; };
PART Exponential exponential(float x) {
  float shifted = x * 1.44269504088896340736f + 12582912.0f;
  float n = shifted - 12582912.0f;
  float r = fmaf(n, -0.6933594f, x);
  r = fmaf(n, 2.1219444e-4f, r);
  float p = 1.9875691e-4f;
  p = fmaf(p, r, 1.3981999e-3f);
  p = fmaf(p, r, 8.333452e-3f);
  p = fmaf(p, r, 4.1665796e-2f);
  p = fmaf(p, r, 1.6666665e-1f);
  p = fmaf(p, r, 0.5f);
  Exponential e;
  e.mantissa = fmaf(p, r * r, r) + 1.0f;
  e.n = (i32)(bits_of(shifted) - 0x4b400000u);
  return e;
}
// Two factors, of which each is normal and the first product exact: one rounding.
PART float exp_of(float x) {
  Exponential e = exponential(larger_or_nan(-105.0f, smaller_or_nan(89.0f, x)));
  i32 half = e.n >> 1, rest = e.n - half;
  return e.mantissa * float_of_bits((u32)(half + 127) << 23) *
         float_of_bits((u32)(rest + 127) << 23);
}
// The same where the result is normal, for `x` from -87 to 87.
PART float normal_exp_of(float x) {
  Exponential e = exponential(x);
  return e.mantissa * float_of_bits((u32)(e.n + 127) << 23);
}
PART float log_of(float x) {
  if (!(0.0f <= x)) return float_of_bits(0x7fc00000);
  if (x == 0.0f) return float_of_bits(0xff800000);
  if (x == float_of_bits(0x7f800000)) return x;
  float e = 0.0f, m = x;
  if (x < 1.17549435e-38f) { m = x * 16777216.0f; e = -24.0f; }
  e += (float)((i32)(bits_of(m) >> 23) - 127);
  m = float_of_bits((bits_of(m) & 0x7fffff) | 0x3f800000);
  if (1.41421356237309504880f < m) { m = m * 0.5f; e = e + 1.0f; }
  float r = m - 1.0f;
  float p = 7.0376836e-2f;
  p = fmaf(p, r, -1.151461e-1f);
  p = fmaf(p, r, 1.1676999e-1f);
  p = fmaf(p, r, -1.2420141e-1f);
  p = fmaf(p, r, 1.4249323e-1f);
  p = fmaf(p, r, -1.6668058e-1f);
  p = fmaf(p, r, 2.0000715e-1f);
  p = fmaf(p, r, -2.4999994e-1f);
  p = fmaf(p, r, 3.333333e-1f);
  float r2 = r * r;
  float y = fmaf(e, -2.1219444e-4f, p * r * r2);
  y = fmaf(r2, -0.5f, y) + r;
  return fmaf(e, 0.6933594f, y);
}
PART float tanh_of(float x) {
  float a = fabsf(x), s = x * x;
  float p = -5.7049887e-3f;
  p = fmaf(p, s, 2.063909e-2f);
  p = fmaf(p, s, -5.3739715e-2f);
  p = fmaf(p, s, 1.3331442e-1f);
  p = fmaf(p, s, -3.333328e-1f);
  float near = fmaf(p * s, x, x);
  a = 10.0f < a ? 10.0f : a;
  float e = normal_exp_of(a + a) + 1.0f;
  float far = copysignf(1.0f - 2.0f * normal_reciprocal(e), x);
  return a < 0.625f ? near : far;
}
// What is added to one below -87 changes nothing.
PART float sigmoid_of(float x) {
  return normal_reciprocal(normal_exp_of(larger_or_nan(-87.0f, smaller_or_nan(86.0f, -x))) + 1.0f);
}
PART float erf_of(float x) {
  float t = fabsf(x), s = x * x;
  float r = fmaf(-1.7285347e-5f, t, 3.831972e-4f);
  float u = fmaf(-3.8839644e-3f, t, 2.4254622e-2f);
  r = fmaf(r, s, u);
  r = fmaf(r, t, -1.0677779e-1f);
  r = fmaf(r, t, -6.3484687e-1f);
  r = fmaf(r, t, -1.2871751e-1f);
  r = fmaf(r, t, -t);
  float far = copysignf(1.0f - normal_exp_of(larger_or_nan(-87.0f, r)), x);
  float p = -5.967617e-4f;
  p = fmaf(p, s, 4.991194e-3f);
  p = fmaf(p, s, -2.6768135e-2f);
  p = fmaf(p, s, 1.12819925e-1f);
  p = fmaf(p, s, -3.7612534e-1f);
  p = fmaf(p, s, 1.2837917e-1f);
  float near = fmaf(p, x, x);
  return 0.9277344f < t ? far : near;
}
PART double exp_of(double x) { return exp(x); }
PART double log_of(double x) { return log(x); }
PART double tanh_of(double x) { return tanh(x); }
PART double erf_of(double x) { return erf(x); }
PART double sigmoid_of(double x) { return 1.0 / (1.0 + exp(-x)); }
PART float sqrt_of(float x) { return sqrtf(x); }
PART double sqrt_of(double x) { return sqrt(x); }
PART float sin_of(float x) { return sinf(x); }
PART double sin_of(double x) { return sin(x); }
PART float cos_of(float x) { return cosf(x); }
PART double cos_of(double x) { return cos(x); }
// Sine and cosine of an angle below 2^31 in magnitude, within an ulp: of CUDA's own, that of large
// angles takes stack. The angle less quarter turns is exact to 2^-100, by a sum of three parts.
PART void sine_and_cosine(double x, double& sine, double& cosine) {
  double n = rint(x * 0.63661977236758134308);
  double r = fma(n, -1.57079632679489661923, x);
  double low = n * -6.12323399573676603587e-17;
  double error = fma(n, -6.12323399573676603587e-17, -low);
  double sum = r + low;
  double lost = (r - sum) + low;
  double tail = lost + fma(n, 1.4973849048591833e-33, error);
  r = sum + tail;
  tail = (sum - r) + tail;
  double z = r * r;
  double s = 1.58969099521155010221e-10;
  s = fma(s, z, -2.50507602534068634195e-08);
  s = fma(s, z, 2.75573137070700676789e-06);
  s = fma(s, z, -1.98412698298579493134e-04);
  s = fma(s, z, 8.33333333332248946124e-03);
  double v = z * r;
  s = r - ((z * (0.5 * tail - v * s) - tail) - v * -1.66666666666666324348e-01);
  double c = -1.13596475577881948265e-11;
  c = fma(c, z, 2.08757232129817482790e-09);
  c = fma(c, z, -2.75573143513906633035e-07);
  c = fma(c, z, 2.48015872894767294178e-05);
  c = fma(c, z, -1.38888888888741095749e-03);
  c = fma(c, z, 4.16666666666666019037e-02);
  double half = 0.5 * z, w = 1.0 - half;
  c = w + (((1.0 - w) - half) + (z * (z * c) - r * tail));
  i64 turns = (i64)n;
  sine = turns & 1 ? c : s;
  cosine = turns & 1 ? s : c;
  if (turns & 2) sine = -sine;
  if ((turns + 1) & 2) cosine = -cosine;
  if (x == 0) sine = x;
}
PART float floor_of(float x) { return floorf(x); }
PART double floor_of(double x) { return floor(x); }
// The largest power of two not above |x|, with the sign of x.
PART float power_floor(float x) {
  if (!(x - x == 0)) return x;
  const bool is_subnormal = (bits_of(x) & 0x7f800000u) == 0;
  const float normal = is_subnormal ? x * 16777216.0f : x;
  const float power = float_of_bits(bits_of(normal) & 0xff800000u);
  return is_subnormal ? power * 5.9604644775390625e-8f : power;
}
PART double power_floor(double x) {
  if (!(x - x == 0) || x == 0) return x;
  return copysign(ldexp(1.0, ilogb(x)), x);
}
PART float abs_of(float x) { return fabsf(x); }
PART double abs_of(double x) { return fabs(x); }
PART float fma_of(float a, float b, float c) { return fmaf(a, b, c); }
PART double fma_of(double a, double b, double c) { return fma(a, b, c); }
PART float pow_of(float a, float b) { return powf(a, b); }
PART double pow_of(double a, double b) { return pow(a, b); }

template <class C> PART C larger(C a, C b) { return is_nan(a) ? a : a > b ? a : b; }
template <class C> PART C smaller(C a, C b) { return is_nan(a) ? a : a < b ? a : b; }
template <class C> PART C wrapped(C x, C half) {
  C turns = floor_of(x * (C)(1.0 / 4294967296.0) + half);
  return fma_of(turns, (C)-4294967296.0, x);
}
template <class C> PART C gelu_tanh(C x) {
  C slope = fma_of(x * x, (C)(2.0 * 0.7978845608028654 * 0.044715), (C)(2.0 * 0.7978845608028654));
  return x * sigmoid_of(x * slope);
}
template <class C> PART C gelu_tanh_grad(C x, C dy) {
  C x2 = x * x;
  C slope = fma_of(x2, (C)(2.0 * 0.7978845608028654 * 0.044715), (C)(2.0 * 0.7978845608028654));
  C rise = fma_of(x2, (C)(6.0 * 0.7978845608028654 * 0.044715), (C)(2.0 * 0.7978845608028654));
  C s = sigmoid_of(x * slope);
  C change = x * rise * (s * ((C)1.0 - s));
  return dy * (s + change);
}
template <class C> PART C normal_below(C x) {
  return fma_of(erf_of(x * (C)0.70710678118654752440), (C)0.5, (C)0.5);
}
template <class C> PART C gelu_erf_grad(C x, C dy) {
  C density = exp_of(x * x * (C)-0.5) * (C)0.3989422804014327;
  return dy * fma_of(x, density, normal_below(x));
}
template <class C> PART C silu_grad(C x, C dy) {
  C s = sigmoid_of(x);
  C inner = fma_of(x, (C)1.0 - s, (C)1.0);
  return dy * (s * inner);
}

// ---- counts of a warp

// The sum of the numbers of the lanes up to the thread's own.
PART u32 sum_up_to_lane(u32 x) {
  const int lane = (int)(threadIdx.x % 32);
  UNROLL
  for (int step = 1; step < 32; step *= 2) {
    const u32 before = shuffle(x, lane < step ? lane : lane - step);
    x += lane < step ? 0 : before;
  }
  return x;
}

// ---- accumulators of tensor cores, stored by quads

// Lanes whose numbers differ in `bits` exchange: the lower one keeps `low` and receives the other's
// `low`, the upper one keeps `high` and receives the other's `high`.
PART void exchange(u32& low, u32& high, int bits) {
  const bool is_upper = threadIdx.x & bits;
  const u32 received = shuffle_xor(is_upper ? low : high, bits);
  if (is_upper) low = received;
  else high = received;
}
// Pairs of columns that the four lanes of a quad have of 1, 2 or 4 tiles of 8 columns: of one tile
// before, and then adjacent ones. Of two tiles lane 0 has the first half of the first, lane 1 that
// of the second, lanes 2 and 3 the others; of four each lane has the tile of its number.
PART void exchange_columns(u32 (&pairs)[2]) { exchange(pairs[0], pairs[1], 1); }
PART void exchange_columns(u32 (&pairs)[4]) {
  exchange(pairs[0], pairs[1], 1);
  exchange(pairs[2], pairs[3], 1);
  exchange(pairs[0], pairs[2], 2);
  exchange(pairs[1], pairs[3], 2);
}
template <class T, int N> PART Vector<T, 2 * N> vector_of(const u32 (&pairs)[N]) {
  Vector<T, 2 * N> x;
  memcpy((void*)&x, pairs, sizeof x);
  return x;
}

// ---- attention on tensor cores

// Two 16 x 8 accumulators that lie side by side, as a 16 x 16 fragment of `a`.
template <class T>
PART void accumulators_to_a(u32 (&a)[4], const float (&left)[4], const float (&right)[4]) {
  a[0] = packed<T>(left[0], left[1]);
  a[1] = packed<T>(left[2], left[3]);
  a[2] = packed<T>(right[0], right[1]);
  a[3] = packed<T>(right[2], right[3]);
}
// Within 4e-7.
PART float tanh_approx(float x) {
  return 1.0f - 2.0f * rcp_approx(ex2_approx(x * 2.88539008177792681472f) + 1.0f);
}
PART i64 clamped(i64 x, i64 most) { return x < 0 ? 0 : x > most ? most : x; }

// ---- matrices in shared memory that warpgroups multiply

const u32 SWIZZLE_128 = 1;
// The descriptor of a matrix (PTX ISA, "matrix descriptor"): address, leading and stride offsets in
// units of 16 bytes at bits 0, 16 and 32, of 14 bits each, and the swizzle at bit 62.
PART u64 matrix_descriptor(u32 address, u32 leading, u32 stride, u32 swizzle) {
  return (u64)((address & 0x3ffff) >> 4) | (u64)(leading >> 4) << 16 | (u64)(stride >> 4) << 32 |
         (u64)swizzle << 62;
}

// ---- integers of 64 bits, modulo 2^64

PART i64 add(i64 a, i64 b) { return (i64)((u64)a + (u64)b); }
PART i64 sub(i64 a, i64 b) { return (i64)((u64)a - (u64)b); }
PART i64 mul(i64 a, i64 b) { return (i64)((u64)a * (u64)b); }
PART i64 neg(i64 x) { return (i64)(0 - (u64)x); }
// Rounded down; zero where the divisor is.
PART i64 floor_div(i64 a, i64 b) {
  if (b == 0) return 0;
  if (b == -1) return neg(a);
  i64 q = a / b;
  return q - (a % b != 0 && (a < 0) != (b < 0));
}
PART i64 power(i64 base, i64 exponent) {
  if (exponent < 0) {
    if (base == 1) return 1;
    if (base == -1) return exponent % 2 == 0 ? 1 : -1;
    return 0;
  }
  u64 result = 1, square = (u64)base;
  for (u64 left = (u64)exponent; left; left >>= 1) {
    if (left & 1) result *= square;
    square *= square;
  }
  return (i64)result;
}

// ---- random draws: ir/src/random.rs

PART u64 mix(u64 x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}
PART u64 stream_of(const u32* key, u32 salt) {
  u64 run = mix((u64)key[1] << 32 | key[0]);
  return mix(run ^ ((u64)salt << 32 | key[2]));
}
PART u64 word_of(u64 stream, u64 count) {
  return mix(stream + count * 0x9e3779b97f4a7c15ULL);
}
PART float uniform(u64 stream, u64 index) {
  return (float)(u32)(word_of(stream, index) >> 40) * (1.0f / 16777216.0f);
}
PART u64 quads_before(u64 at) {
  return at >> 4 << 2 | (at >> 1 & 3);
}
/* A quarter of a mix: those of an index without bits 0 and 3, and of 1, 8 and 9 after it, share it.
   The index is a sum: `row` is a multiple of 16, `col` and `step` have no bit in common; draws that
   differ in `step` alone have expressions in common. */
PART float uniform_short(u64 stream, u64 row, u64 col, u64 step) {
  const u64 count = (row >> 2) + quads_before(col) + quads_before(step);
  const u32 quarter = (u32)((col | step) & 1) | (u32)((col | step) >> 2 & 2);
  return (float)(u32)(word_of(stream, count) >> (16 * quarter) & 0xffff) * (1.0f / 65536.0f);
}
