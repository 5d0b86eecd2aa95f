"""What is timed, with which clock, in which order, and what a time is compared with: samples, intervals, floors."""
