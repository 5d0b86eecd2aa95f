"""A module's forward as data: ATen calls, capture, element types, and the module that a task carries."""
