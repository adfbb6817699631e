"""Writing artifacts: evaluating weights, writing and replacing the folder, predicted costs."""
