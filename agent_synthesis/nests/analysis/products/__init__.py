"""What schedules of matrix products and convolutions ask of a nest: what their factors are, and what they end with."""
