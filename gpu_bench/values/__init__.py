"""Values to judge and to time on: drawn from families, within what a module takes."""
