"""The language "nccl": collectives that the runtime calls in NVIDIA's library, described without a binary."""
