"""Processes of a session, ready before they are needed, and the memory that they share."""
