"""The endpoint /v1/messages, as in Anthropic's Messages API."""
