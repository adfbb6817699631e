"""GPU benches: the engine and single kernels beside their floors. They can be imported without a GPU."""
