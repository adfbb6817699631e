"""The CUDA device, on the driver API."""
