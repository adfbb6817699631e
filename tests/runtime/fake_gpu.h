// What the drivers without a GPU share, libcuda.cpp and libamdhip64.cpp: device memory is host memory, kernels are
// functions of shared objects, and a stream runs its work only when it is waited for, so that a change of a buffer before
// then gives a wrong result. Statuses have the same numbers in both APIs. fake_fail injects faults.
#pragma once
#include <dlfcn.h>
#include <fcntl.h>
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

enum Status {
  OK = 0, INVALID = 1, OOM = 2, NO_DEVICE = 100, INVALID_IMAGE = 200, INVALID_CONTEXT = 201, INVALID_HANDLE = 400,
  NOT_FOUND = 500, NOT_READY = 600, CAPTURE = 900
};
typedef std::function<void(void**, const unsigned*)> Entry;

struct Function { Entry entry; std::string name; int max_shared = 48 << 10; int params = 0; const int* bytes = nullptr; };
struct Module { void* handle; std::string image; };
struct Node { Function* f; std::vector<std::string> values; unsigned grid[3]; bool pdl; unsigned cluster[3]; };
struct Graph { std::vector<Node> nodes; };
struct Stream { std::deque<std::function<void()>> queue; Graph* capture = nullptr; long done = 0, put = 0; };
struct Event { Stream* stream = nullptr; long at = 0; };

static std::recursive_mutex lock;
static std::map<uintptr_t, size_t> device, pinned, registered;
static std::set<Stream*> streams;
static std::map<std::string, std::pair<int, long>> faults;  // name -> (status, calls until then)
static std::string log_;
static int visible() { const char* n = getenv("FAKE_GPUS"); return n ? atoi(n) : 1; }
static int lost = 0, retained = 0, driver_version = 13000, devices = visible();
static size_t total = 1ull << 30, used = 0;
static thread_local void* context = nullptr;

static int enter(const char* name, bool need = true) {
  auto f = faults.find(name);
  if (f != faults.end() && --f->second.second < 0) { int s = f->second.first; faults.erase(f); return s; }
  if (need && !context) return INVALID_CONTEXT;  // this thread has none
  return lost;
}

static bool inside(const std::map<uintptr_t, size_t>& m, uintptr_t p, size_t n) {
  auto it = m.upper_bound(p);
  if (it == m.begin()) return false;
  --it;
  return p + n <= it->first + it->second;
}
static bool host(const void* h, size_t n) { return inside(pinned, (uintptr_t)h, n) || inside(registered, (uintptr_t)h, n); }
static int put(Stream* s, std::function<void()> f) {
  if (!s || !streams.count(s)) return INVALID_HANDLE;
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

// Memory of whole pages of 2 MiB is a file in memory, so that another process can map it by a handle.
static const size_t GRAIN = 2 << 20;
static std::map<uintptr_t, int> files;       // allocation -> its file
static std::map<uintptr_t, size_t> mapped;   // allocations of other processes
struct Handle { int pid, fd; uint64_t bytes; char rest[48]; };

static int allocate(uintptr_t* p, size_t n) {
  if (!n) return INVALID;
  if (used + n > total) return OOM;
  void* q;
  if (n % GRAIN) {
    q = aligned_alloc(512, (n + 511) / 512 * 512);
  } else {
    int fd = memfd_create("device", MFD_CLOEXEC);
    if (ftruncate(fd, (off_t)n)) return OOM;
    q = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    files[(uintptr_t)q] = fd;
  }
  memset(q, 0xA5, n);
  device[(uintptr_t)q] = n; used += n; *p = (uintptr_t)q;
  return OK;
}
static int release(uintptr_t p) {
  for (Stream* s : streams) drain(s, s->put);
  if (!device.count(p)) return INVALID;
  size_t n = device[p];
  used -= n; device.erase(p);
  auto file = files.find(p);
  if (file == files.end()) { free((void*)p); return OK; }
  munmap((void*)p, n);
  close(file->second);
  files.erase(file);
  return OK;
}
static int share(Handle* h, uintptr_t p) {
  if (!files.count(p)) return INVALID;
  memset(h, 0, sizeof *h);
  *h = {getpid(), files[p], device[p], {}};
  return OK;
}
static int open_shared(uintptr_t* p, const Handle* h) {
  if (h->pid == getpid()) return INVALID_CONTEXT;  // as the driver: not in the process that has allocated it
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", h->pid, h->fd);
  int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return INVALID_HANDLE;
  *p = (uintptr_t)mmap(nullptr, h->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  mapped[*p] = h->bytes;
  return OK;
}
static int close_shared(uintptr_t p) {
  auto m = mapped.find(p);
  if (m == mapped.end()) return INVALID;
  munmap((void*)p, m->second);
  mapped.erase(m);
  return OK;
}
static int pin(void** p, size_t n) {
  *p = aligned_alloc(4096, (n + 4095) / 4096 * 4096);
  memset(*p, 0x5A, n);
  pinned[(uintptr_t)*p] = n;
  return OK;
}
static int unpin(void* p) { if (!pinned.erase((uintptr_t)p)) return INVALID; free(p); return OK; }

static int copy_in(uintptr_t d, const void* h, size_t n, Stream* s) {
  if (!inside(device, d, n) || !host(h, n)) return INVALID;
  log_ += "up ";
  return put(s, [=] {
    if (host(h, n)) memcpy((void*)d, h, n);
    else lost = 700;  // given back while the copy was under way
  });
}
static int copy_out(void* h, uintptr_t d, size_t n, Stream* s) {
  if (!inside(device, d, n) || !inside(pinned, (uintptr_t)h, n)) return INVALID;
  log_ += "down ";
  return put(s, [=] { memcpy(h, (void*)d, n); });
}
static int copy_within(uintptr_t d, uintptr_t from, size_t n, Stream* s) {
  if (!inside(device, d, n) || !inside(device, from, n) || (from < d + n && d < from + n)) return INVALID;
  return put(s, [=] { memcpy((void*)d, (void*)from, n); });
}
static int read_back(void* h, uintptr_t d, size_t n) {
  if (!inside(device, d, n)) return INVALID;
  memcpy(h, (void*)d, n);
  return OK;
}
static int fill(uintptr_t d, int c, size_t n, Stream* s) {
  if (!inside(device, d, n)) return INVALID;
  log_ += "zero ";
  return put(s, [=] { memset((void*)d, c, n); });
}

static int destroy_stream(Stream* s) { if (!streams.erase(s)) return INVALID_HANDLE; delete s; return OK; }
static int synchronize(Stream* s) { if (!streams.count(s)) return INVALID_HANDLE; drain(s, s->put); return lost; }
static int record(Event* e, Stream* s) { e->stream = s; e->at = s->put; log_ += "mark "; return OK; }
static int wait_event(Event* e) { if (e->stream) drain(e->stream, e->at); return lost; }
static int query(Event* e) {
  // A process that only asks must see progress; with FAKE_GPU_PROGRESS, asking runs the work.
  if (e->stream && getenv("FAKE_GPU_PROGRESS")) drain(e->stream, e->at);
  return lost ? lost : e->stream && e->stream->done < e->at ? NOT_READY : OK;
}

// The bytes of an ELF file, whose sections end it.
static size_t elf_bytes(const void* image) {
  const unsigned char* e = (const unsigned char*)image;
  return *(uint64_t*)(e + 40) + (size_t)*(uint16_t*)(e + 58) * *(uint16_t*)(e + 60);
}
static int load_module(Module** m, const void* image) {
  if (memcmp(image, "\x7f" "ELF", 4)) return INVALID_IMAGE;
  size_t size = elf_bytes(image);
  int fd = memfd_create("kernel", 0);
  if (write(fd, image, size) != (ssize_t)size) return INVALID_IMAGE;
  char path[64];
  snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
  void* handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);  // the file stays open: dlopen knows libraries by their path
  if (!handle) return INVALID_IMAGE;
  *m = new Module{handle, ""};
  return OK;
}
static int find_function(Function** f, Module* m, const char* name) {
  void* entry = dlsym(m->handle, name);
  if (!entry) return NOT_FOUND;
  Function* fn = new Function{(void (*)(void**, const unsigned*))entry, name};
  int* params = (int*)dlsym(m->handle, "num_params");
  fn->params = params ? *params : 0;
  fn->bytes = (const int*)dlsym(m->handle, "param_bytes");
  *f = fn;
  return OK;
}

static int begin_capture(Stream* s, int mode) {
  if (s->capture || mode != 1) return CAPTURE;  // 1: of this thread
  s->capture = new Graph;
  return OK;
}
static int end_capture(Stream* s, Graph** g) {
  if (!s->capture) return CAPTURE;
  *g = s->capture;
  s->capture = nullptr;
  return OK;
}
static int instantiate(Graph** e, Graph* g) {
  *e = new Graph(*g);
  char text[64];
  snprintf(text, sizeof text, "graph%zu%s ", g->nodes.size(), g->nodes.size() && g->nodes[0].pdl ? "-pdl" : "");
  log_ += text;
  return OK;
}
static int replay(const Graph& g, Stream* s) {
  log_ += "replay ";
  return put(s, [=] { for (const Node& n : g.nodes) run(n); });
}

static void reset(int version) {
  faults.clear(); log_.clear(); lost = 0; driver_version = version; devices = visible(); total = 1ull << 30;
}

extern "C" {
// What the tests use.
void fake_fail(const char* name, int status, long after) { faults[name] = {status, after}; }
long fake_used() { return (long)(device.size() + pinned.size() + registered.size() + streams.size() + mapped.size() + retained); }
const char* fake_log() { return log_.c_str(); }
void fake_clear_log() { log_.clear(); }
}
