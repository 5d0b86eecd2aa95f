"""A language model that chooses among legal moves: its prompt, its options, its answer."""
