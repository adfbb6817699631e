"""Text processing: tokenizer, incremental detokenizer, stop strings and chat templates."""
