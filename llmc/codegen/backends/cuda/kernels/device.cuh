// Element types and dependent launch for CUDA C++ kernels. This text precedes that of every kernel. NVRTC is called
// without an include path, so CUDA's headers are not available.

struct bf16 { unsigned short bits; };
struct f16 { unsigned short bits; };

// The 128 bytes of a CUtensorMap. A kernel declares it as the parameter `const __grid_constant__ TensorMap x`.
struct alignas(64) TensorMap { unsigned char bytes[128]; };

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(bf16 x) { return __uint_as_float((unsigned)x.bits << 16); }
__device__ inline float to_float(f16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}

// Rounds to nearest, ties to even.
template <typename T> __device__ T from_float(float x);
template <> __device__ inline float from_float<float>(float x) { return x; }
template <> __device__ inline bf16 from_float<bf16>(float x) {
  bf16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
template <> __device__ inline f16 from_float<f16>(float x) {
  f16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}

// Rounds f16 to bf16.
__device__ inline bf16 to_bf16(bf16 x) { return x; }
__device__ inline bf16 to_bf16(f16 x) { return from_float<bf16>(to_float(x)); }

// The 32-bit address in shared memory that instructions take.
__device__ inline unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

// Programmatic dependent launch, on targets that have it. Every thread calls `wait_for_previous` before it accesses
// memory other than weights and before it returns: it waits until the previous kernel has completed and its writes are
// visible. `launch_dependents` allows the next kernel to begin, once every block has called it or exited.
__device__ inline void wait_for_previous() {
#if LLMC_PDL
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ inline void launch_dependents() {
#if LLMC_PDL
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ inline void begin_launch() {
  wait_for_previous();
  launch_dependents();
}
