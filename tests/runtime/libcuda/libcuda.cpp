// A CUDA driver without a GPU, for tests; see fake_gpu.h.
// Kernels: extern "C" void entry(void** params, const unsigned* grid), with num_params and, where some are wider than 8
// bytes, param_bytes.
#include <atomic>

#include "../fake_gpu.h"

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct { unsigned grid[3], block[3], shared; void* stream; void* attrs; unsigned num_attrs; } Config;
typedef struct { int id; char pad[4]; char value[64]; } Attr;
// What a tensor map of this driver holds: what it was made of.
struct TensorMap { int32_t type, rank; uint64_t address, dims[5], steps[4]; uint32_t box[5]; int32_t swizzle; };
static_assert(sizeof(TensorMap) <= 128, "a tensor map is 128 bytes");

static int major_ = 9, minor_ = 0;
static int registers = 1;  // whether read-only memory can be registered
static int reaches = 1;    // whether GPUs can access each other's memory
static int gpu_ = -1;      // the GPU whose context was retained
static size_t registrations = 0, most_registered = 0;
static char the_context;
static std::atomic<int> executables{0};  // graphs

#define ENTER(name) std::lock_guard<std::recursive_mutex> held(lock); if (int s_ = enter(name)) return s_
#define ENTER0(name) std::lock_guard<std::recursive_mutex> held(lock); if (int s_ = enter(name, false)) return s_

extern "C" {
// What the tests use.
void fake_reset() { reset(13000); major_ = 9; minor_ = 0; registers = reaches = 1; registrations = most_registered = 0; gpu_ = -1; }
void fake_reaches(int yes) { reaches = yes; }
int fake_device() { return gpu_; }
void fake_registers(int yes) { registers = yes; }
long fake_registrations() { return (long)registrations; }
long fake_most_registered() { return (long)most_registered; }
void fake_gpu(int version, int major, int minor, int count, unsigned long long bytes) {
  driver_version = version; major_ = major; minor_ = minor; devices = count; total = bytes;
}
// What libnccl.cpp uses. The number of executable graphs; a line of the log.
int fake_graphs() { return executables; }
void fake_note(const char* text) { std::lock_guard<std::recursive_mutex> held(lock); log_ += std::string(text) + " "; }
// Puts a call into a stream, or into the graph that is captured. `values` are its parameters.
CUresult fake_call(void* stream, const char* name, void (*f)(void**, const unsigned*), const uint64_t* values, int count) {
  ENTER("fake_call");
  Stream* s = (Stream*)stream;
  if (!streams.count(s)) return INVALID_HANDLE;
  Node n{new Function{f, name}, {}, {1, 1, 1}, false, {1, 1, 1}};
  for (int i = 0; i < count; i++) n.values.emplace_back((const char*)(values + i), 8);
  log_ += std::string(name) + " ";
  if (s->capture) { s->capture->nodes.push_back(n); return OK; }
  return put(s, [=] { run(n); });
}
CUresult cuInit(unsigned) { ENTER0("cuInit"); return devices ? OK : 100; }
CUresult cuDriverGetVersion(int* v) { *v = driver_version; return OK; }
CUresult cuDeviceGetCount(int* n) { *n = devices; return OK; }
CUresult cuDeviceGet(CUdevice* d, int n) { *d = n; return n < devices ? OK : 101; }
CUresult cuDeviceCanAccessPeer(int* can, CUdevice a, CUdevice b) { ENTER0("cuDeviceCanAccessPeer"); *can = reaches && a != b; return OK; }
CUresult cuDeviceGetName(char* name, int n, CUdevice) { snprintf(name, n, "Fake GPU"); return OK; }
CUresult cuDeviceGetAttribute(int* v, int which, CUdevice) {
  *v = which == 75 ? major_ : which == 76 ? minor_ : which == 97 ? 232448 : which == 113 ? registers : 0;
  return OK;
}
CUresult cuDevicePrimaryCtxRetain(void** c, CUdevice d) { ENTER0("cuDevicePrimaryCtxRetain"); retained++; gpu_ = d; *c = &the_context; return OK; }
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice) {
  if (--retained == 0 && lost) { device.clear(); pinned.clear(); registered.clear(); streams.clear(); used = 0; lost = 0; }
  return OK;
}
extern "C" int fake_retained() { return retained; }
CUresult cuCtxSetCurrent(void* c) { context = c; return OK; }
CUresult cuGetErrorName(int e, const char** s) { *s = "NAME"; return OK; }
CUresult cuGetErrorString(int e, const char** s) { *s = "words of the driver"; return OK; }
CUresult cuMemGetInfo_v2(size_t* f, size_t* t) { ENTER("cuMemGetInfo"); *f = total - used; *t = total; return OK; }
CUresult cuMemAlloc_v2(CUdeviceptr* p, size_t n) { ENTER("cuMemAlloc"); return allocate((uintptr_t*)p, n); }
CUresult cuMemFree_v2(CUdeviceptr p) { ENTER("cuMemFree"); return release(p); }
CUresult cuIpcGetMemHandle(Handle* h, CUdeviceptr p) { ENTER("cuIpcGetMemHandle"); return share(h, p); }
CUresult cuIpcOpenMemHandle_v2(CUdeviceptr* p, Handle h, unsigned flags) {
  ENTER("cuIpcOpenMemHandle");
  return flags == 1 ? open_shared((uintptr_t*)p, &h) : INVALID;
}
CUresult cuIpcCloseMemHandle(CUdeviceptr p) { ENTER("cuIpcCloseMemHandle"); return close_shared(p); }
CUresult cuMemAllocHost_v2(void** p, size_t n) { ENTER("cuMemAllocHost"); return pin(p, n); }
CUresult cuMemFreeHost(void* p) { ENTER0("cuMemFreeHost"); return unpin(p); }
CUresult cuMemHostRegister_v2(void* p, size_t n, unsigned flags) {
  ENTER("cuMemHostRegister");
  uintptr_t a = (uintptr_t)p;
  if (!registers) return 801;
  if (flags != 8 || !n || a % 4096 || n % 4096) return INVALID;
  auto next = registered.lower_bound(a);
  if (next != registered.end() && next->first < a + n) return 712;  // already registered, in part at least
  if (next != registered.begin() && (--next)->first + next->second > a) return 712;
  if (msync(p, n, MS_ASYNC)) return INVALID;  // nothing is mapped there
  registered[a] = n;
  registrations++;
  size_t now = 0;
  for (auto& r : registered) now += r.second;
  if (now > most_registered) most_registered = now;
  return OK;
}
CUresult cuMemHostUnregister(void* p) { ENTER("cuMemHostUnregister"); return registered.erase((uintptr_t)p) ? OK : 713; }
CUresult cuStreamCreate(void** s, unsigned flags) { ENTER("cuStreamCreate"); Stream* t = new Stream; streams.insert(t); *s = t; return flags == 1 ? OK : INVALID; }
CUresult cuStreamDestroy_v2(void* s) { ENTER0("cuStreamDestroy"); return destroy_stream((Stream*)s); }
CUresult cuStreamSynchronize(void* s) { ENTER("cuStreamSynchronize"); return synchronize((Stream*)s); }
CUresult cuEventCreate(void** e, unsigned flags) { ENTER("cuEventCreate"); *e = new Event; return OK; }
CUresult cuEventDestroy_v2(void* e) { delete (Event*)e; return OK; }
CUresult cuEventRecord(void* e, void* s) { ENTER("cuEventRecord"); return record((Event*)e, (Stream*)s); }
CUresult cuStreamWaitEvent(void* s, void* e, unsigned) {
  ENTER("cuStreamWaitEvent");
  Stream* other = ((Event*)e)->stream;
  long at = ((Event*)e)->at;
  log_ += (uintptr_t)s == 1 ? "legacy-waits " : (uintptr_t)s == 2 ? "thread-waits " : "waits ";
  return (uintptr_t)s <= 2 ? OK : put((Stream*)s, [=] { if (other) drain(other, at); });
}
CUresult cuEventSynchronize(void* e) { ENTER("cuEventSynchronize"); return wait_event((Event*)e); }
CUresult cuEventQuery(void* e) { ENTER("cuEventQuery"); return query((Event*)e); }
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr d, const void* h, size_t n, void* s) {
  ENTER("cuMemcpyHtoDAsync");
  return copy_in(d, h, n, (Stream*)s);
}
CUresult cuMemcpyDtoHAsync_v2(void* h, CUdeviceptr d, size_t n, void* s) {
  ENTER("cuMemcpyDtoHAsync");
  return copy_out(h, d, n, (Stream*)s);
}
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr d, CUdeviceptr from, size_t n, void* s) {
  ENTER("cuMemcpyDtoDAsync");
  return copy_within(d, from, n, (Stream*)s);
}
CUresult cuMemcpy2DAsync_v2(const void*, void*) { return 801; }
CUresult cuMemcpyDtoH_v2(void* h, CUdeviceptr d, size_t n) { ENTER("cuMemcpyDtoH"); return read_back(h, d, n); }
CUresult cuMemsetD8Async(CUdeviceptr d, unsigned char c, size_t n, void* s) {
  ENTER("cuMemsetD8Async");
  return fill(d, c, n, (Stream*)s);
}
CUresult cuModuleLoadData(void** m, const void* image) { ENTER("cuModuleLoadData"); return load_module((Module**)m, image); }
CUresult cuModuleUnload(void* m) { ENTER0("cuModuleUnload"); return OK; }
CUresult cuModuleGetFunction(void** f, void* m, const char* name) {
  ENTER("cuModuleGetFunction");
  return find_function((Function**)f, (Module*)m, name);
}
CUresult cuFuncSetAttribute(void* f, int which, int value) { ENTER("cuFuncSetAttribute"); if (which != 8) return INVALID; ((Function*)f)->max_shared = value; return OK; }
CUresult cuTensorMapEncodeTiled(void* out, int type, uint32_t rank, void* address, const uint64_t* dims, const uint64_t* steps,
                                const uint32_t* box, const uint32_t* every, int interleave, int swizzle, int promotion, int fill) {
  ENTER("cuTensorMapEncodeTiled");
  if (rank < 2 || rank > 5 || interleave || fill || swizzle < 0 || swizzle > 3 || (uintptr_t)address % 16 || (uintptr_t)out % 64) return INVALID;
  TensorMap m = {type, (int32_t)rank, (uint64_t)address, {}, {}, {}, swizzle};
  for (unsigned i = 0; i < rank; i++) {
    if (!dims[i] || dims[i] > 1ull << 32 || !box[i] || box[i] > 256 || every[i] != 1) return INVALID;
    if (i && (steps[i - 1] % 16 || steps[i - 1] >= 1ull << 40)) return INVALID;
    m.dims[i] = dims[i];
    m.box[i] = box[i];
    if (i) m.steps[i - 1] = steps[i - 1];
  }
  memset(out, 0, 128);
  memcpy(out, &m, sizeof m);
  return OK;
}
CUresult cuLaunchKernelEx(const Config* c, void* f, void** params, void** extra) {
  ENTER("cuLaunchKernelEx");
  Function* fn = (Function*)f;
  Stream* s = (Stream*)c->stream;
  if (!streams.count(s) || !c->grid[0] || !c->grid[1] || !c->grid[2] || !c->block[0] || extra) return INVALID;
  if ((int)c->shared > fn->max_shared) return INVALID;
  Node n{fn, {}, {c->grid[0], c->grid[1], c->grid[2]}, false, {1, 1, 1}};
  for (unsigned i = 0; i < c->num_attrs; i++) {
    const Attr* a = (const Attr*)c->attrs + i;
    if (a->id == 4) memcpy(n.cluster, a->value, sizeof n.cluster);
    else if (a->id == 6) n.pdl = *(int*)a->value == 1;
    else return INVALID;
  }
  for (int i = 0; i < 3; i++) if (!n.cluster[i] || n.grid[i] % n.cluster[i]) return 912;  // INVALID_CLUSTER_SIZE
  if (n.cluster[0] * n.cluster[1] * n.cluster[2] > 8) return 912;
  for (int i = 0; i < fn->params; i++) {
    int bytes = fn->bytes ? fn->bytes[i] : 8;
    if ((uintptr_t)params[i] % (bytes == 128 ? 128 : 4)) return INVALID;  // a CUtensorMap is aligned to its size
    n.values.emplace_back((const char*)params[i], bytes);
  }
  if (s->capture) { s->capture->nodes.push_back(n); return OK; }
  log_ += n.pdl ? "launch-pdl" : "launch";
  if (n.cluster[0] * n.cluster[1] * n.cluster[2] > 1) {
    char text[64];
    snprintf(text, sizeof text, "-cluster%ux%ux%u", n.cluster[0], n.cluster[1], n.cluster[2]);
    log_ += text;
  }
  log_ += " ";
  return put(s, [=] { run(n); });
}
CUresult cuStreamBeginCapture_v2(void* s, int mode) {
  ENTER("cuStreamBeginCapture");
  return begin_capture((Stream*)s, mode);
}
CUresult cuStreamEndCapture(void* s, void** g) {
  ENTER("cuStreamEndCapture");
  return end_capture((Stream*)s, (Graph**)g);
}
CUresult cuGraphInstantiateWithFlags(void** e, void* g, unsigned long long) {
  ENTER("cuGraphInstantiate");
  executables++;
  return instantiate((Graph**)e, (Graph*)g);
}
CUresult cuGraphUpload(void*, void*) { ENTER("cuGraphUpload"); return OK; }
CUresult cuGraphDestroy(void* g) { delete (Graph*)g; return OK; }
CUresult cuGraphExecDestroy(void* g) { delete (Graph*)g; executables--; return OK; }
CUresult cuGraphLaunch(void* e, void* s) { ENTER("cuGraphLaunch"); return replay(*(Graph*)e, (Stream*)s); }
CUresult cuGetProcAddress_v2(const char* name, void** out, int version, uint64_t flags, int* found) {
  std::string n = name;
  if (n == "cuGraphInstantiate") n = "cuGraphInstantiateWithFlags";
  static void* self = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  void* p = dlsym(self, (n + "_v2").c_str());
  *out = p ? p : dlsym(self, n.c_str());
  if (found) *found = *out ? 0 : 1;
  return *out ? OK : NOT_FOUND;
}
}
