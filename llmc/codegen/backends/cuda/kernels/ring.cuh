// The ring of buffers in shared memory between the producer and the consumer warpgroups of a block, and their loops.
// Needs hopper.cuh.

// A position in the ring.
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

// The producer of a block that computes one tile after another: one thread issues the copies of all tiles, each when its
// buffer is free. With `early`, the weights of the first steps are copied before the previous kernel has completed.
// tiles: count() and find(i) of the tiles of clusters of `blocks` blocks. copy_weights(ring, tile, step) expects the
// bytes of a whole buffer and copies the weights, copy_tokens(ring, tile, step) the tokens.
template <int steps, int blocks, bool early, int STAGES, int BYTES, typename Tiles, typename Weights, typename Tokens>
__device__ inline void produce_tiles(BufferRing<STAGES, BYTES> ring, const Tiles& tiles, Weights copy_weights,
                                     Tokens copy_tokens) {
  const int first = blockIdx.x / blocks, count = tiles.count();
  int ahead = 0;  // steps whose weights have been requested
  if (early && first < count) {
    const auto tile = tiles.find(first);
    auto next = ring;
    for (; ahead < min(STAGES, steps); ahead++, next.advance()) copy_weights(next, tile, ahead);
  }
  begin_launch();
  for (int i = first; i < count; i += gridDim.x / blocks) {
    const auto tile = tiles.find(i);
    for (int step = 0; step < steps; step++, ring.advance()) {
      if (ahead > 0) {
        ahead--;
      } else {
        barrier_wait(ring.freed(), ring.parity ^ 1);
        copy_weights(ring, tile, step);
      }
      copy_tokens(ring, tile, step);
    }
  }
}

// The products of a tile by a consumer warpgroup: multiply(i) waits for the buffer and issues those of step i. A buffer is
// released one step late, when the products that read it have completed; the products of the next step already run.
template <int steps, typename Ring, typename Multiply, typename Release>
__device__ inline void consume_steps(Ring& ring, Multiply multiply, Release release) {
  unsigned previous = 0;
#pragma unroll 1
  for (int i = 0; i < steps; i++) {
    multiply(i);
    end_products();
    if (i > 0) {
      wait_products<1>();
      release(previous);
    }
    previous = ring.freed();
    ring.advance();
  }
  wait_products<0>();
  release(previous);
}
