"""An untrusted `ModelNew`, judged and timed from outside its process."""
