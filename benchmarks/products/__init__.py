"""Matrix products and attention: times, errors and every setting."""
