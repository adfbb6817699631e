"""The requests of the API: their fields, parsing and limits."""
