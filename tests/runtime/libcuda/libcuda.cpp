// A CUDA driver without a GPU, for tests: device memory is host memory, kernels are functions of shared objects, and a
// stream does nothing before somebody waits for it, so that whoever changes a buffer too early is found out.
// Kernels: extern "C" void entry(void** params, const unsigned* grid), with num_params and, where some are wider than 8
// bytes, param_bytes. Faults are put in with fake_fail.
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct { unsigned grid[3], block[3], shared; void* stream; void* attrs; unsigned num_attrs; } Config;
typedef struct { int id; char pad[4]; char value[64]; } Attr;
typedef void (*Entry)(void**, const unsigned*);
enum { OK = 0, INVALID = 1, OOM = 2, NOT_FOUND = 500, NOT_READY = 600, CAPTURE = 900 };

struct Function { Entry entry; std::string name; int max_shared = 48 << 10; int params = 0; const int* bytes = nullptr; };
struct Module { void* handle; std::vector<Function*> functions; };
struct Node { Function* f; std::vector<std::string> values; unsigned grid[3]; bool pdl; unsigned cluster[3]; };
// What a tensor map of this driver holds: what it was made of.
struct TensorMap { int32_t type, rank; uint64_t address, dims[5], steps[4]; uint32_t box[5]; int32_t swizzle; };
static_assert(sizeof(TensorMap) <= 128, "a tensor map is 128 bytes");
struct Graph { std::vector<Node> nodes; };
struct Stream { std::deque<std::function<void()>> queue; Graph* capture = nullptr; long done = 0, put = 0; };
struct Event { Stream* stream = nullptr; long at = 0; };

static std::recursive_mutex lock;
static std::map<uintptr_t, size_t> device, pinned, registered;
static std::set<Stream*> streams;
static std::map<std::string, std::pair<int, long>> faults;  // name -> (status, calls until then)
static std::string log_;
static int lost = 0, retained = 0, driver_version = 13000, major_ = 9, minor_ = 0, devices = 1;
static size_t total = 1ull << 30, used = 0, registrations = 0, most_registered = 0;
static int registers = 1;  // whether read-only memory can be registered
static thread_local void* context = nullptr;
static char the_context;

static int enter(const char* name, bool need = true) {
  auto f = faults.find(name);
  if (f != faults.end() && --f->second.second < 0) { int s = f->second.first; faults.erase(f); return s; }
  if (need && !context) return 201;  // INVALID_CONTEXT: this thread has none
  return lost;
}
#define ENTER(name) std::lock_guard<std::recursive_mutex> held(lock); if (int s_ = enter(name)) return s_
#define ENTER0(name) std::lock_guard<std::recursive_mutex> held(lock); if (int s_ = enter(name, false)) return s_

static bool inside(const std::map<uintptr_t, size_t>& m, uintptr_t p, size_t n) {
  auto it = m.upper_bound(p);
  if (it == m.begin()) return false;
  --it;
  return p + n <= it->first + it->second;
}
static bool host(const void* h, size_t n) { return inside(pinned, (uintptr_t)h, n) || inside(registered, (uintptr_t)h, n); }
static int put(Stream* s, std::function<void()> f) {
  if (!s || !streams.count(s)) return 400;
  if (s->capture) return CAPTURE;
  s->queue.push_back(f);
  s->put++;
  return OK;
}
static void drain(Stream* s, long until) {
  while (s->done < until && !s->queue.empty()) {
    auto f = s->queue.front();
    s->queue.pop_front();
    if (!lost) f();
    s->done++;
  }
}
static void run(const Node& n) {
  auto f = faults.find("kernel");
  if (f != faults.end() && --f->second.second < 0) { lost = f->second.first; faults.erase(f); return; }
  std::vector<std::string> values = n.values;
  std::vector<void*> params;
  for (auto& v : values) params.push_back(v.data());
  n.f->entry(params.data(), n.grid);
}

extern "C" {
// What the tests use.
void fake_reset() {
  faults.clear(); log_.clear(); lost = 0; driver_version = 13000; major_ = 9; minor_ = 0; devices = 1; total = 1ull << 30;
  registers = 1; registrations = most_registered = 0;
}
void fake_registers(int yes) { registers = yes; }
long fake_registrations() { return (long)registrations; }
long fake_most_registered() { return (long)most_registered; }
void fake_fail(const char* name, int status, long after) { faults[name] = {status, after}; }
void fake_gpu(int version, int major, int minor, int count, unsigned long long bytes) {
  driver_version = version; major_ = major; minor_ = minor; devices = count; total = bytes;
}
long fake_used() { return (long)(device.size() + pinned.size() + registered.size() + streams.size() + retained); }
const char* fake_log() { return log_.c_str(); }
void fake_clear_log() { log_.clear(); }

CUresult cuInit(unsigned) { ENTER0("cuInit"); return devices ? OK : 100; }
CUresult cuDriverGetVersion(int* v) { *v = driver_version; return OK; }
CUresult cuDeviceGetCount(int* n) { *n = devices; return OK; }
CUresult cuDeviceGet(CUdevice* d, int) { *d = 0; return OK; }
CUresult cuDeviceGetName(char* name, int n, CUdevice) { snprintf(name, n, "Fake GPU"); return OK; }
CUresult cuDeviceGetAttribute(int* v, int which, CUdevice) {
  *v = which == 75 ? major_ : which == 76 ? minor_ : which == 97 ? 232448 : which == 113 ? registers : 0;
  return OK;
}
CUresult cuDevicePrimaryCtxRetain(void** c, CUdevice) { ENTER0("cuDevicePrimaryCtxRetain"); retained++; *c = &the_context; return OK; }
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice) {
  if (--retained == 0 && lost) { device.clear(); pinned.clear(); registered.clear(); streams.clear(); used = 0; lost = 0; }
  return OK;
}
CUresult cuCtxSetCurrent(void* c) { context = c; return OK; }
CUresult cuGetErrorName(int e, const char** s) { *s = "NAME"; return OK; }
CUresult cuGetErrorString(int e, const char** s) { *s = "words of the driver"; return OK; }
CUresult cuMemGetInfo_v2(size_t* f, size_t* t) { ENTER("cuMemGetInfo"); *f = total - used; *t = total; return OK; }
CUresult cuMemAlloc_v2(CUdeviceptr* p, size_t n) {
  ENTER("cuMemAlloc");
  if (!n) return INVALID;
  if (used + n > total) return OOM;
  void* q = aligned_alloc(512, (n + 511) / 512 * 512);
  memset(q, 0xA5, n);
  device[(uintptr_t)q] = n; used += n; *p = (CUdeviceptr)q;
  return OK;
}
CUresult cuMemFree_v2(CUdeviceptr p) {
  ENTER("cuMemFree");
  for (Stream* s : streams) drain(s, s->put);
  if (!device.count(p)) return INVALID;
  used -= device[p]; device.erase(p); free((void*)p);
  return OK;
}
CUresult cuMemAllocHost_v2(void** p, size_t n) {
  ENTER("cuMemAllocHost");
  *p = aligned_alloc(4096, (n + 4095) / 4096 * 4096);
  memset(*p, 0x5A, n);
  pinned[(uintptr_t)*p] = n;
  return OK;
}
CUresult cuMemFreeHost(void* p) { ENTER0("cuMemFreeHost"); if (!pinned.erase((uintptr_t)p)) return INVALID; free(p); return OK; }
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
CUresult cuStreamDestroy_v2(void* s) { ENTER0("cuStreamDestroy"); if (!streams.erase((Stream*)s)) return 400; delete (Stream*)s; return OK; }
CUresult cuStreamSynchronize(void* s) { ENTER("cuStreamSynchronize"); if (!streams.count((Stream*)s)) return 400; drain((Stream*)s, ((Stream*)s)->put); return lost; }
CUresult cuEventCreate(void** e, unsigned flags) { ENTER("cuEventCreate"); *e = new Event; return OK; }
CUresult cuEventDestroy_v2(void* e) { delete (Event*)e; return OK; }
CUresult cuEventRecord(void* e, void* s) {
  ENTER("cuEventRecord");
  Event* v = (Event*)e; v->stream = (Stream*)s; v->at = ((Stream*)s)->put;
  log_ += "mark ";
  return OK;
}
CUresult cuStreamWaitEvent(void* s, void* e, unsigned) {
  ENTER("cuStreamWaitEvent");
  Stream* other = ((Event*)e)->stream;
  long at = ((Event*)e)->at;
  log_ += (uintptr_t)s == 1 ? "legacy-waits " : (uintptr_t)s == 2 ? "thread-waits " : "waits ";
  return (uintptr_t)s <= 2 ? OK : put((Stream*)s, [=] { if (other) drain(other, at); });
}
CUresult cuEventSynchronize(void* e) {
  ENTER("cuEventSynchronize");
  Event* v = (Event*)e;
  if (v->stream) drain(v->stream, v->at);
  return lost;
}
CUresult cuEventQuery(void* e) {
  ENTER("cuEventQuery");
  Event* v = (Event*)e;
  return lost ? lost : v->stream && v->stream->done < v->at ? 600 : OK;
}
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr d, const void* h, size_t n, void* s) {
  ENTER("cuMemcpyHtoDAsync");
  if (!inside(device, d, n) || !host(h, n)) return INVALID;
  log_ += "up ";
  return put((Stream*)s, [=] {
    if (host(h, n)) memcpy((void*)d, h, n);
    else lost = 700;  // given back while the copy was under way
  });
}
CUresult cuMemcpyDtoHAsync_v2(void* h, CUdeviceptr d, size_t n, void* s) {
  ENTER("cuMemcpyDtoHAsync");
  if (!inside(device, d, n) || !inside(pinned, (uintptr_t)h, n)) return INVALID;
  log_ += "down ";
  return put((Stream*)s, [=] { memcpy(h, (void*)d, n); });
}
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr d, CUdeviceptr from, size_t n, void* s) {
  ENTER("cuMemcpyDtoDAsync");
  if (!inside(device, d, n) || !inside(device, from, n) || (from < d + n && d < from + n)) return INVALID;
  return put((Stream*)s, [=] { memcpy((void*)d, (void*)from, n); });
}
CUresult cuMemcpy2DAsync_v2(const void*, void*) { return 801; }
CUresult cuMemcpyDtoH_v2(void* h, CUdeviceptr d, size_t n) { ENTER("cuMemcpyDtoH"); if (!inside(device, d, n)) return INVALID; memcpy(h, (void*)d, n); return OK; }
CUresult cuMemsetD8Async(CUdeviceptr d, unsigned char c, size_t n, void* s) {
  ENTER("cuMemsetD8Async");
  if (!inside(device, d, n)) return INVALID;
  log_ += "zero ";
  return put((Stream*)s, [=] { memset((void*)d, c, n); });
}
CUresult cuModuleLoadData(void** m, const void* image) {
  ENTER("cuModuleLoadData");
  if (memcmp(image, "\x7f" "ELF", 4)) return 200;
  const unsigned char* e = (const unsigned char*)image;
  size_t size = *(uint64_t*)(e + 40) + (size_t)*(uint16_t*)(e + 58) * *(uint16_t*)(e + 60);  // sections end the file
  int fd = memfd_create("kernel", 0);
  if (write(fd, image, size) != (ssize_t)size) return 200;
  char path[64];
  snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
  void* handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);  // the file stays open: dlopen knows libraries by their path
  if (!handle) return 200;
  *m = new Module{handle, {}};
  return OK;
}
CUresult cuModuleUnload(void* m) { ENTER0("cuModuleUnload"); return OK; }
CUresult cuModuleGetFunction(void** f, void* m, const char* name) {
  ENTER("cuModuleGetFunction");
  void* entry = dlsym(((Module*)m)->handle, name);
  if (!entry) return NOT_FOUND;
  Function* fn = new Function{(Entry)entry, name};
  int* params = (int*)dlsym(((Module*)m)->handle, "num_params");
  fn->params = params ? *params : 0;
  fn->bytes = (const int*)dlsym(((Module*)m)->handle, "param_bytes");
  *f = fn;
  return OK;
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
  if (((Stream*)s)->capture || mode != 1) return CAPTURE;
  ((Stream*)s)->capture = new Graph;
  return OK;
}
CUresult cuStreamEndCapture(void* s, void** g) {
  ENTER("cuStreamEndCapture");
  if (!((Stream*)s)->capture) return CAPTURE;
  *g = ((Stream*)s)->capture;
  ((Stream*)s)->capture = nullptr;
  return OK;
}
CUresult cuGraphInstantiateWithFlags(void** e, void* g, unsigned long long) {
  ENTER("cuGraphInstantiate");
  *e = new Graph(*(Graph*)g);
  char text[64];
  snprintf(text, sizeof text, "graph%zu%s ", ((Graph*)g)->nodes.size(), ((Graph*)g)->nodes.size() && ((Graph*)g)->nodes[0].pdl ? "-pdl" : "");
  log_ += text;
  return OK;
}
CUresult cuGraphUpload(void*, void*) { ENTER("cuGraphUpload"); return OK; }
CUresult cuGraphDestroy(void* g) { delete (Graph*)g; return OK; }
CUresult cuGraphExecDestroy(void* g) { delete (Graph*)g; return OK; }
CUresult cuGraphLaunch(void* e, void* s) {
  ENTER("cuGraphLaunch");
  Graph g = *(Graph*)e;
  log_ += "replay ";
  return put((Stream*)s, [=] { for (const Node& n : g.nodes) run(n); });
}
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
