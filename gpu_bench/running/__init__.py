"""Programs run: the candidate's process, executors for each target, memory and machine code."""
