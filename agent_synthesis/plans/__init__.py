"""Plans: which calls of a graph run as one kernel, by which schedule, the moves that change that, and what it costs."""
