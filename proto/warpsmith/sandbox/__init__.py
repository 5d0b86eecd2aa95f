"""How code that nobody trusts is confined: jails, the workers in them, and files that nobody else may touch."""
