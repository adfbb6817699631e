"""GPU benches: whole engine and single kernels against their floors; importable without a GPU, run only with one."""
