"""Device backends: the `Device` interface and its implementations for CPUs and NVIDIA GPUs."""
