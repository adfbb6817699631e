// NCCL on the driver without GPUs: ranks, in processes or threads, exchange results through a file in memory.
// FAKE_NCCL_VERSION is the version. FAKE_NCCL_FAIL is FUNCTION:RANK:STATUS; with the status -1, the process is killed.
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <string>

static const int RANKS = 8, SLOTS = 4;
static const size_t BYTES = 4096;  // of a message of a rank
struct Area {
  std::atomic<int> joined;
  std::atomic<uint64_t> sent[RANKS], read[RANKS];
  char data[SLOTS][RANKS][BYTES];
};
struct Comm { Area* area; int rank, ranks; uint64_t next; std::atomic<int> aborted; };
struct Id { int pid, fd; char rest[120]; };
static std::string last_error;
static const size_t SIZES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};  // of ncclDataType_t

static int fault(const char* name, int rank) {
  const char* text = getenv("FAKE_NCCL_FAIL");
  char function[64];
  int of, status;
  if (!text || sscanf(text, "%63[^:]:%d:%d", function, &of, &status) != 3 || strcmp(function, name) || of != rank) return 0;
  if (status < 0) kill(getpid(), SIGKILL);
  last_error = "words of the library";
  return status;
}
static bool wait(Comm* c, const std::atomic<uint64_t>& count, uint64_t least) {
  for (int i = 0; i < 30000; i++) {
    if (count >= least) return true;
    if (c->aborted) return false;
    usleep(1000);
  }
  return false;
}
// Parameters: communicator, operand, result, count, dtype, whether to gather.
static void exchange(void** params, const unsigned*) {
  uint64_t p[6];
  for (int i = 0; i < 6; i++) p[i] = *(uint64_t*)params[i];
  Comm* c = (Comm*)p[0];
  char *x = (char*)p[1], *y = (char*)p[2];
  size_t n = p[3] * SIZES[p[4]];
  uint64_t at = c->next++, slot = at % SLOTS;
  if (n > BYTES) abort();
  for (int r = 0; r < c->ranks; r++) if (!wait(c, c->area->read[r], at < SLOTS ? 0 : at - SLOTS + 1)) return;
  memcpy(c->area->data[slot][c->rank], x, n);
  c->area->sent[c->rank]++;
  for (int r = 0; r < c->ranks; r++) if (!wait(c, c->area->sent[r], at + 1)) return;
  if (!p[5]) memset(y, 0, n);
  for (int r = 0; r < c->ranks; r++) {
    char* from = c->area->data[slot][r];
    if (p[5]) memcpy(y + r * n, from, n);
    else if (p[4] == 7) for (size_t i = 0; i < p[3]; i++) ((float*)y)[i] += ((float*)from)[i];
    else if (p[4] == 2) for (size_t i = 0; i < p[3]; i++) ((int32_t*)y)[i] += ((int32_t*)from)[i];
    else abort();
  }
  c->area->read[c->rank]++;
}
// A control function of libcuda.cpp.
template <class F> static F driver(const char* name) {
  return (F)dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD), name);
}
static int submit(Comm* c, const char* name, const void* x, void* y, size_t n, int dtype, int gather, void* stream) {
  if (!c || c->aborted) return 4;
  if (int status = fault(name, c->rank)) return status;
  typedef int (*Call)(void*, const char*, void (*)(void**, const unsigned*), const uint64_t*, int);
  static Call call = driver<Call>("fake_call");
  uint64_t values[] = {(uint64_t)c, (uint64_t)x, (uint64_t)y, n, (uint64_t)dtype, (uint64_t)gather};
  std::string text = std::string(name) + "-" + std::to_string(dtype) + "x" + std::to_string(n);
  return call(stream, text.c_str(), exchange, values, 6) ? 1 : 0;
}

extern "C" {
int ncclGetVersion(int* version) {
  const char* text = getenv("FAKE_NCCL_VERSION");
  *version = text ? atoi(text) : 22703;
  return 0;
}
int ncclGetUniqueId(Id* id) {
  if (int status = fault("ncclGetUniqueId", 0)) return status;
  memset(id, 0, sizeof *id);
  id->pid = getpid();
  id->fd = memfd_create("nccl", MFD_CLOEXEC);
  return ftruncate(id->fd, sizeof(Area)) ? 2 : 0;
}
int ncclCommInitRank(Comm** comm, int ranks, Id id, int rank) {
  if (int status = fault("ncclCommInitRank", rank)) return status;
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", id.pid, id.fd);
  int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return 2;
  Area* area = (Area*)mmap(nullptr, sizeof(Area), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  *comm = new Comm{area, rank, ranks, 0, {0}};
  area->joined++;
  for (int i = 0; area->joined < ranks; i++) {
    if (i == 5000) return 2;
    usleep(1000);
  }
  return 0;
}
int ncclCommAbort(Comm* c) {  // as the library: kernels give up; it returns once no graph has collectives
  c->aborted = 1;
  for (int i = 0; driver<int (*)()>("fake_graphs")(); i++) {
    if (i == 5000) return 3;
    usleep(1000);
  }
  driver<void (*)(const char*)>("fake_note")("ncclCommAbort");
  return 0;
}
int ncclCommGetAsyncError(Comm* c, int* status) { *status = fault("background", c->rank); return 0; }
const char* ncclGetErrorString(int status) { return status == 6 ? "remote process exited" : "unhandled system error"; }
const char* ncclGetLastError(Comm*) { return last_error.c_str(); }
int ncclAllReduce(const void* x, void* y, size_t n, int dtype, int op, Comm* c, void* stream) {
  return op ? 4 : submit(c, "ncclAllReduce", x, y, n, dtype, 0, stream);
}
int ncclAllGather(const void* x, void* y, size_t n, int dtype, Comm* c, void* stream) {
  return submit(c, "ncclAllGather", x, y, n, dtype, 1, stream);
}
}
