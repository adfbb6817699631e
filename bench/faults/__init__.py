"""The fault run: a served engine is killed, stopped, left, overloaded and fed nonsense; every answer is checked."""
