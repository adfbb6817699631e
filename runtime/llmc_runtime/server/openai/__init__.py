"""The endpoints that generate: completions and chat completions."""
