"""The reasoning agent: says what to try next on a plan, and when to stop."""
