"""GPU benches: the engine and single kernels, compared with lower bounds of their time. They can be imported without a
GPU."""
