"""What nobody meant: random modules, and plans, programs and replies made up."""
