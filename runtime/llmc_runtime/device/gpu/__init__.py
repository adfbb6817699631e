"""What the GPU devices share: rings of staging memory, uploads, graphs from lists of launches."""
