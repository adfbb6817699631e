"""The endpoint of Anthropic's Messages API, /v1/messages."""
