"""How untrusted code is confined: jails, the workers in them, and files that no other user may touch."""
