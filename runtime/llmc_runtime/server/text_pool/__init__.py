"""Text processes: separate processes that parse large request bodies, render templates and tokenize, within limits."""
