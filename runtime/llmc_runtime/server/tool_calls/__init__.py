"""Tool calls and reasoning: the formats in which models write them, and OpenAI's message fields."""
