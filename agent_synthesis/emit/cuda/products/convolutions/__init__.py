"""Convolutions as products on tensor cores: windows of the data are copied as boxes."""
