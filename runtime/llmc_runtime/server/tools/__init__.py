"""Tool calls and reasoning in chats: what a model writes on one side, the fields of OpenAI's messages on the other."""
