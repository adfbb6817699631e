"""The intermediate representation: symbolic sizes, types, ops, graphs, and their text form."""
