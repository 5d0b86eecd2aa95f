"""For those who do not take our word: records, and judging them and other people's solutions again."""
