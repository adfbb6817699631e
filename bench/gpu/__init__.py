"""GPU benches: the engine and single kernels, compared with lower bounds. They can be imported without a GPU."""
