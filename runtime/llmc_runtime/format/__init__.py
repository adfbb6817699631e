"""The artifact format, shared by compiler and runtime: parsing, validation and serialization of an artifact's files."""
