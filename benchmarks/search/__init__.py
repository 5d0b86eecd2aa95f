"""How well strategies and reasoners choose, on landscapes that were measured whole."""
