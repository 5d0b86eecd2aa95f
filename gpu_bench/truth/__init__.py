"""What the right answer is: the module as it is and in float64, and how far off rounding may be."""
