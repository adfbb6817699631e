"""The endpoint /v1/messages, with Anthropic's names."""
