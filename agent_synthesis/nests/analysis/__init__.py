"""What schedules ask of a nest: which reductions share a visit, what a product's sums become, which loads rows share.

Nothing here knows a target, settings or text.
"""
