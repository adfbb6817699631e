"""Passes that turn the traced model into entry points for serving."""
