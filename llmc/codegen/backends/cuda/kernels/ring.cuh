// A position in a ring of buffers in shared memory between the producer and the consumer warpgroups of a block.

template <int STAGES, int STAGE_BYTES> struct BufferRing {
  unsigned buffers, full, empty;  // addresses in shared memory
  int stage = 0, parity = 0;

  __device__ BufferRing(unsigned buffers, unsigned full, unsigned empty) : buffers(buffers), full(full), empty(empty) {}
  __device__ int offset() const { return stage * STAGE_BYTES; }
  __device__ unsigned buffer() const { return buffers + offset(); }
  __device__ unsigned arrived() const { return full + 8 * stage; }
  __device__ unsigned freed() const { return empty + 8 * stage; }
  __device__ void advance() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};
