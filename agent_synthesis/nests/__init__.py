"""What one kernel computes, without saying how: loop nests, what they mean, and what is recognised in them."""
