"""From what the user named to a task: read, run once in a jail, made small."""
