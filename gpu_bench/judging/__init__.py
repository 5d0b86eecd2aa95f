"""What is right: the judge's process, the truth, and how far a result may be from it."""
