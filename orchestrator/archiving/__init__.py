"""What keeps an archive well: checks, recovery, copies."""
