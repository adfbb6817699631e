"""The intermediate representation: dims, types, ops, graphs and their text; it knows no model, target or kernel."""
