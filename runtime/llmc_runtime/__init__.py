"""The runtime: opens an artifact and serves it. It compiles nothing and knows no torch."""
