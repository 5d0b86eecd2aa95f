"""The synthesis agent: captures modules, plans kernels by moves, and writes them."""
