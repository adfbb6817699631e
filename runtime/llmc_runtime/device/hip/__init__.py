"""The HIP device, for AMD GPUs."""
