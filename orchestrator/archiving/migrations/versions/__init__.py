"""One module a revision, each named after its number and what it brings."""
