"""From a Hugging Face folder to IR and to its weights. Empty on purpose: torch is imported only when a part is used."""
