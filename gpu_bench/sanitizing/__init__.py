"""compute-sanitizer over a program's kernels."""
