"""What a time is worth: A/A, floors, exports timed apart, rows and examples."""
