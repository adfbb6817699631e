"""Text to token ids and back: tokenizer, incremental detokenizer, stop strings, chat templates; no scheduler."""
