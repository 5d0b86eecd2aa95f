"""How untrusted code is confined: jails, the workers in them, and files and Python text that are only read."""
