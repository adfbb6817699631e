"""The frontend: from a Hugging Face folder to IR and weights. Importing this package does not import torch."""
