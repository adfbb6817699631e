"""HTTP primitives: connections, limits on heads and bodies, authentication, errors and responses."""
