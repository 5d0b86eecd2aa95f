"""What writes parts of an exported file: library calls, returned structures, text of others."""
