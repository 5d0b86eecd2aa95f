"""Which settings of a row reduction on CUDA are legal, which come first, which lie one change apart."""
