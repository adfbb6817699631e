"""The KV cache as the scheduler sees it: page allocation and prefix caching. Memory is managed by the executor."""
