"""The OpenAI-compatible HTTP server over an engine. Requires the extra "serve"."""
