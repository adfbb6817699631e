"""From a compiled module to a folder: weights evaluated, files written, what is inside told; it compiles nothing."""
