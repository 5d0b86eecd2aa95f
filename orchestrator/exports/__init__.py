"""A result as a file to import: flavours, and the host code that they carry."""
