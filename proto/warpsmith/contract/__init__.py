"""The contract as Python sees it beside the stubs: the words of its values, and what earlier versions wrote."""
