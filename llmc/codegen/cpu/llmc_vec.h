// Vectors of float lanes by the compiler's vector extension (no intrinsics), and the storage dtypes as loads and stores.
#ifndef LLMC_VEC_H
#define LLMC_VEC_H
#include <stdint.h>
#include <string.h>
#if defined(__AVX512F__)
#define LLMC_VB 64
#elif defined(__AVX2__)
#define LLMC_VB 32
#else
#define LLMC_VB 16
#endif
namespace llmc {
constexpr int W = LLMC_VB / 4;  // float lanes
typedef float vf __attribute__((vector_size(LLMC_VB)));
typedef int32_t vi __attribute__((vector_size(LLMC_VB)));
typedef uint32_t vu __attribute__((vector_size(LLMC_VB)));
typedef uint16_t vh __attribute__((vector_size(LLMC_VB / 2)));
typedef uint8_t vb __attribute__((vector_size(LLMC_VB / 4)));
struct bf16 { uint16_t u; };
struct f16 { uint16_t u; };
struct b8 { uint8_t u; };  // bool

static inline vf splat(float x) { return vf{} + x; }
static inline vi vbits(vf x) { vi r; memcpy(&r, &x, sizeof r); return r; }
static inline vf vfloat(vi x) { vf r; memcpy(&r, &x, sizeof r); return r; }
static inline vf vfloat(vu x) { vf r; memcpy(&r, &x, sizeof r); return r; }
static inline uint32_t bits(float x) { uint32_t r; memcpy(&r, &x, 4); return r; }
static inline float from_bits(uint32_t x) { float r; memcpy(&r, &x, 4); return r; }
// m ? a : b, lane by lane; a true lane of m is -1.
static inline vf vselect(vi m, vf a, vf b) { return vfloat((m & vbits(a)) | (~m & vbits(b))); }

// bf16: the upper half of a float; rounded to nearest even, a NaN stays a (quiet) NaN.
static inline float to_float(bf16 h) { return from_bits((uint32_t)h.u << 16); }
static inline bf16 to_bf16(float x) {
  uint32_t u = bits(x), r = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return bf16{(uint16_t)(x != x ? (u >> 16) | 0x40u : r)};
}
static inline vh vto_bf16(vf x) {
  vu u = (vu)vbits(x), r = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16, nan = (vu)(x != x);
  r = (nan & ((u >> 16) | 0x40u)) | (~nan & r);
  return __builtin_convertvector(r, vh);
}
// f16 by integer arithmetic: subnormals exact, overflow to infinity, round to nearest even.
static inline vf vfrom_f16(vh h) {
  vu w = __builtin_convertvector(h, vu), m = w & 0x7fffu;
  vf x = vfloat(m << 13) * 0x1p112f;
  vu inf = (vu)(m >= 0x7c00u);
  return vfloat(((vu)vbits(x) | (inf & 0x7f800000u)) | ((w & 0x8000u) << 16));
}
static inline vh vto_f16(vf x) {
  vu u = (vu)vbits(x), sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
  vu normal = (a + 0xfffu + ((a >> 13) & 1u) - 0x38000000u) >> 13;
  vu small = (vu)vbits(vfloat(a) + 0.5f) - 0x3f000000u;
  vu is_small = (vu)(a < 0x38800000u), is_inf = (vu)(a >= 0x47800000u), is_nan = (vu)(a > 0x7f800000u);
  vu r = (is_small & small) | (~is_small & normal);
  r = (is_inf & 0x7c00u) | (~is_inf & r);
  r = (is_nan & 0x7e00u) | (~is_nan & r);
  return __builtin_convertvector(r | sign, vh);
}
static inline float to_float(f16 h) { return vfrom_f16(vh{} + h.u)[0]; }
static inline float to_float(float x) { return x; }
static inline float to_float(b8 x) { return x.u ? 1.0f : 0.0f; }
template <class T> static inline float to_float(T x) { return (float)x; }
template <class T> static inline T from_float(float x) { return (T)x; }
template <> inline bf16 from_float<bf16>(float x) { return to_bf16(x); }
template <> inline f16 from_float<f16>(float x) { return f16{vto_f16(splat(x))[0]}; }
template <> inline b8 from_float<b8>(float x) { return b8{(uint8_t)(x != 0.0f)}; }

// W elements of a storage dtype as float lanes, and back.
template <class T> static inline vf load(const T* p) {
  vf r;
  for (int i = 0; i < W; i++) r[i] = to_float(p[i]);
  return r;
}
template <> inline vf load<float>(const float* p) { vf r; memcpy(&r, p, sizeof r); return r; }
template <> inline vf load<bf16>(const bf16* p) {
  vh h;
  memcpy(&h, p, sizeof h);
  return vfloat(__builtin_convertvector(h, vu) << 16);
}
template <> inline vf load<f16>(const f16* p) { vh h; memcpy(&h, p, sizeof h); return vfrom_f16(h); }
template <> inline vf load<int32_t>(const int32_t* p) {
  vi v;
  memcpy(&v, p, sizeof v);
  return __builtin_convertvector(v, vf);
}
template <> inline vf load<b8>(const b8* p) {
  vb v;
  memcpy(&v, p, sizeof v);
  return __builtin_convertvector(__builtin_convertvector(v, vi) != 0 ? (vi{} + 1) : vi{}, vf);
}
template <class T> static inline void store(T* p, vf x) {
  for (int i = 0; i < W; i++) p[i] = from_float<T>(x[i]);
}
template <> inline void store<float>(float* p, vf x) { memcpy(p, &x, sizeof x); }
template <> inline void store<bf16>(bf16* p, vf x) { vh h = vto_bf16(x); memcpy(p, &h, sizeof h); }
template <> inline void store<f16>(f16* p, vf x) { vh h = vto_f16(x); memcpy(p, &h, sizeof h); }
template <> inline void store<int32_t>(int32_t* p, vf x) { vi v = __builtin_convertvector(x, vi); memcpy(p, &v, sizeof v); }
template <> inline void store<b8>(b8* p, vf x) {
  vb v = __builtin_convertvector((x != 0.0f) & 1, vb);
  memcpy(p, &v, sizeof v);
}
// The first n (0 < n < W) elements; lanes beyond them are `fill` when loaded and not written when stored.
template <class T> static inline vf load_part(const T* p, int64_t n, float fill = 0.0f) {
  T buf[W] = {};
  memcpy((void*)buf, (const void*)p, n * sizeof(T));
  vf r = load<T>(buf);
  vi lane;
  for (int i = 0; i < W; i++) lane[i] = i;
  return vselect(lane < (vi{} + (int32_t)n), r, splat(fill));
}
template <class T> static inline void store_part(T* p, vf x, int64_t n) {
  T buf[W];
  store<T>(buf, x);
  memcpy((void*)p, (const void*)buf, n * sizeof(T));
}
// Lane reductions: pairwise, so that the order of additions does not depend on the optimiser.
static inline vf vswap(vf x, int s) {  // lane i becomes lane i ^ s
#if defined(__clang__)
  vf r;
  for (int i = 0; i < W; i++) r[i] = x[i ^ s];
  return r;
#else
  vi m;
  for (int i = 0; i < W; i++) m[i] = i ^ s;
  return __builtin_shuffle(x, m);
#endif
}
static inline vf vmax(vf a, vf b) { return vselect((a > b) | (a != a), a, b); }  // NaN in either gives NaN
static inline vf vmin(vf a, vf b) { return vselect((a < b) | (a != a), a, b); }
static inline float hsum(vf x) {
  if (W >= 16) x += vswap(x, 8 % W);
  if (W >= 8) x += vswap(x, 4 % W);
  x += vswap(x, 2);
  x += vswap(x, 1);
  return x[0];
}
static inline float hmax(vf x) {
  if (W >= 16) x = vmax(x, vswap(x, 8 % W));
  if (W >= 8) x = vmax(x, vswap(x, 4 % W));
  x = vmax(x, vswap(x, 2));
  x = vmax(x, vswap(x, 1));
  return x[0];
}
}  // namespace llmc
#endif
