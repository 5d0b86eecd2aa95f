"""Pieces of language models and image models as training steps."""
