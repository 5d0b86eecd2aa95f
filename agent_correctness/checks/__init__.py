"""The checks of a verdict, in order, and the limits that they hold outputs to."""
