"""The correctness agent: judges whether a candidate computes what the module computes."""
