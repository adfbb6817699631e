"""The contract between compiler and runtime: what an artifact's files say; it reads and checks, it runs nothing."""
