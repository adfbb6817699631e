// AMD's HIP runtime without a GPU, for tests; see fake_gpu.h. With -DREAL_HEADERS the declarations are those of ROCm.
// Kernels are functions of shared objects, as in libcuda.cpp, or of code objects for AMD GPUs: those are described and run
// by functions of the tests (fake_code_objects).
#include "../fake_gpu.h"

#ifdef REAL_HEADERS
#include <hip/hip_runtime_api.h>
#else
#include "hip_declarations.h"
#endif

enum { NO_BINARY_FOR_GPU = 209, AMDGPU = 224 };
// hipDeviceProp_t since ROCm 6, as far as the device reads it.
struct Properties {
  char name[256], uuid[16], luid[8];
  unsigned mask;
  size_t memory, shared;
  char others[856], arch[256], more[56];
};
static_assert(sizeof(Properties) == 1472 && offsetof(Properties, arch) == 1160, "as hipDeviceProp_tR0600");
// Writes the bytes of a kernel's parameters and returns their number, -1 if the image has no such kernel.
typedef int (*Describe)(const char* image, size_t size, const char* entry, int* bytes, int most);
typedef void (*Execute)(const char* image, size_t size, const char* entry, void** params, const unsigned* grid);

static std::string arch = "gfx942:sramecc+:xnack-";
static size_t shared_ = 64 << 10;
static Describe describe = nullptr;
static Execute execute = nullptr;
static char entered;

static hipError_t status(int s) { return (hipError_t)s; }
#define ENTER(name) std::lock_guard<std::recursive_mutex> held(lock); if (int s_ = enter(name)) return status(s_)
#define ENTER0(name) std::lock_guard<std::recursive_mutex> held(lock); if (int s_ = enter(name, false)) return status(s_)

// The architecture in the flags of a code object.
static const char* arch_of(const char* image) {
  switch (*(uint32_t*)(image + 48) & 0xff) {
    case 0x3f: return "gfx90a";
    case 0x4c: return "gfx942";
    case 0x4f: return "gfx950";
  }
  return "?";
}
static int find_kernel(Function** f, Module* m, const char* name) {
  int* bytes = new int[64];
  int count = describe(m->image.data(), m->image.size(), name, bytes, 64);
  if (count < 0) return NOT_FOUND;
  std::string entry = name;
  *f = new Function{[=](void** params, const unsigned* grid) {
    execute(m->image.data(), m->image.size(), entry.c_str(), params, grid);
  }, entry};
  (*f)->params = count;
  (*f)->bytes = bytes;
  return OK;
}

extern "C" {
// What the tests use.
void fake_reset() { reset(70226015); arch = "gfx942:sramecc+:xnack-"; shared_ = 64 << 10; }
void fake_gpu(int version, const char* name, int count, unsigned long long bytes) {
  driver_version = version; arch = name; devices = count; total = bytes;
}
void fake_code_objects(Describe d, Execute e) { describe = d; execute = e; }
unsigned long long fake_extent(unsigned long long p) {  // bytes from an address to the end of its allocation
  auto it = device.upper_bound(p);
  if (it == device.begin()) return 0;
  --it;
  return p < it->first + it->second ? it->first + it->second - p : 0;
}

hipError_t hipInit(unsigned flags) { ENTER0("hipInit"); return status(devices ? OK : 101); }  // as ROCm without a GPU
hipError_t hipRuntimeGetVersion(int* v) { *v = driver_version; return hipSuccess; }
hipError_t hipGetDeviceCount(int* n) { ENTER0("hipGetDeviceCount"); *n = devices; return status(devices ? OK : NO_DEVICE); }
hipError_t hipSetDevice(int i) { ENTER0("hipSetDevice"); context = &entered; return status(i < devices ? OK : 101); }
hipError_t hipGetDevicePropertiesR0600(void* out, int) {
  Properties p = {};
  snprintf(p.name, sizeof p.name, "Fake GPU");
  snprintf(p.arch, sizeof p.arch, "%s", arch.c_str());
  p.memory = total;
  p.shared = arch.rfind("gfx950", 0) == 0 ? 160 << 10 : shared_;
  memcpy(out, &p, sizeof p);
  return hipSuccess;
}
const char* hipGetErrorName(hipError_t) { return "NAME"; }
const char* hipGetErrorString(hipError_t) { return "words of the driver"; }

hipError_t hipMemGetInfo(size_t* f, size_t* t) { ENTER("hipMemGetInfo"); *f = total - used; *t = total; return hipSuccess; }
hipError_t hipMalloc(void** p, size_t n) { ENTER("hipMalloc"); return status(allocate((uintptr_t*)p, n)); }
hipError_t hipFree(void* p) { ENTER("hipFree"); return status(release((uintptr_t)p)); }
hipError_t hipHostMalloc(void** p, size_t n, unsigned flags) {
  ENTER("hipHostMalloc");
  return status(flags ? INVALID : pin(p, n));
}
hipError_t hipHostFree(void* p) { ENTER0("hipHostFree"); return status(unpin(p)); }
hipError_t hipMemcpyAsync(void* to, const void* from, size_t n, hipMemcpyKind kind, hipStream_t s) {
  ENTER("hipMemcpyAsync");
  if (kind == hipMemcpyHostToDevice) return status(copy_in((uintptr_t)to, from, n, (Stream*)s));
  if (kind == hipMemcpyDeviceToHost) return status(copy_out(to, (uintptr_t)from, n, (Stream*)s));
  if (kind == hipMemcpyDeviceToDevice) return status(copy_within((uintptr_t)to, (uintptr_t)from, n, (Stream*)s));
  return status(INVALID);
}
hipError_t hipMemcpy(void* to, const void* from, size_t n, hipMemcpyKind kind) {
  ENTER("hipMemcpy");
  return status(kind == hipMemcpyDeviceToHost ? read_back(to, (uintptr_t)from, n) : INVALID);
}
hipError_t hipMemsetAsync(void* to, int value, size_t n, hipStream_t s) {
  ENTER("hipMemsetAsync");
  return status(fill((uintptr_t)to, value, n, (Stream*)s));
}

hipError_t hipStreamCreateWithFlags(hipStream_t* s, unsigned flags) {
  ENTER("hipStreamCreateWithFlags");
  Stream* t = new Stream;
  streams.insert(t);
  *s = (hipStream_t)t;
  return status(flags == 1 ? OK : INVALID);
}
hipError_t hipStreamDestroy(hipStream_t s) { ENTER0("hipStreamDestroy"); return status(destroy_stream((Stream*)s)); }
hipError_t hipStreamSynchronize(hipStream_t s) { ENTER("hipStreamSynchronize"); return status(synchronize((Stream*)s)); }
hipError_t hipEventCreateWithFlags(hipEvent_t* e, unsigned) {
  ENTER("hipEventCreateWithFlags");
  *e = (hipEvent_t) new Event;
  return hipSuccess;
}
hipError_t hipEventDestroy(hipEvent_t e) { delete (Event*)e; return hipSuccess; }
hipError_t hipEventRecord(hipEvent_t e, hipStream_t s) { ENTER("hipEventRecord"); return status(record((Event*)e, (Stream*)s)); }
hipError_t hipEventSynchronize(hipEvent_t e) { ENTER("hipEventSynchronize"); return status(wait_event((Event*)e)); }
hipError_t hipEventQuery(hipEvent_t e) { ENTER("hipEventQuery"); return status(query((Event*)e)); }

hipError_t hipModuleLoadData(hipModule_t* m, const void* image) {
  ENTER("hipModuleLoadData");
  const char* bytes = (const char*)image;
  if (!memcmp(bytes, "\x7f" "ELF", 4) && *(uint16_t*)(bytes + 18) == AMDGPU) {
    if (arch.compare(0, 6, arch_of(bytes))) return status(NO_BINARY_FOR_GPU);
    *m = (hipModule_t) new Module{nullptr, std::string(bytes, elf_bytes(image))};
    return hipSuccess;
  }
  return status(load_module((Module**)m, image));
}
hipError_t hipModuleUnload(hipModule_t) { ENTER0("hipModuleUnload"); return hipSuccess; }
hipError_t hipModuleGetFunction(hipFunction_t* f, hipModule_t m, const char* name) {
  ENTER("hipModuleGetFunction");
  Module* module = (Module*)m;
  return status((module->handle ? find_function : find_kernel)((Function**)f, module, name));
}
hipError_t hipModuleLaunchKernel(hipFunction_t f, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
                                 unsigned shared, hipStream_t stream, void** params, void** extra) {
  ENTER("hipModuleLaunchKernel");
  Function* fn = (Function*)f;
  Stream* s = (Stream*)stream;
  if (!streams.count(s) || !x || !y || !z || !bx || bx > 1024 || by != 1 || bz != 1 || extra) return status(INVALID);
  if ((uint64_t)x * bx >= 1ull << 32 || shared > (arch.rfind("gfx950", 0) == 0 ? 160u << 10 : shared_)) return status(INVALID);
  Node n{fn, {}, {x, y, z}, false, {1, 1, 1}};
  for (int i = 0; i < fn->params; i++) n.values.emplace_back((const char*)params[i], fn->bytes ? fn->bytes[i] : 8);
  if (s->capture) { s->capture->nodes.push_back(n); return hipSuccess; }
  log_ += "launch ";
  return status(put(s, [=] { run(n); }));
}

hipError_t hipStreamBeginCapture(hipStream_t s, hipStreamCaptureMode mode) {
  ENTER("hipStreamBeginCapture");
  return status(begin_capture((Stream*)s, mode));
}
hipError_t hipStreamEndCapture(hipStream_t s, hipGraph_t* g) {
  ENTER("hipStreamEndCapture");
  return status(end_capture((Stream*)s, (Graph**)g));
}
hipError_t hipGraphInstantiateWithFlags(hipGraphExec_t* e, hipGraph_t g, unsigned long long flags) {
  ENTER("hipGraphInstantiateWithFlags");
  return status(flags ? INVALID : instantiate((Graph**)e, (Graph*)g));
}
hipError_t hipGraphUpload(hipGraphExec_t, hipStream_t) { ENTER("hipGraphUpload"); return hipSuccess; }
hipError_t hipGraphDestroy(hipGraph_t g) { delete (Graph*)g; return hipSuccess; }
hipError_t hipGraphExecDestroy(hipGraphExec_t e) { delete (Graph*)e; return hipSuccess; }
hipError_t hipGraphLaunch(hipGraphExec_t e, hipStream_t s) {
  ENTER("hipGraphLaunch");
  return status(replay(*(Graph*)e, (Stream*)s));
}
}
