"""Recurrent networks and loops of any cell, in one kernel that keeps their weights on chip."""
