"""One package per kernel language: its kernels, and the toolchain that compiles them."""
