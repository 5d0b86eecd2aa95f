"""From ATen calls to loop nests: `groups` lowers, and each family of operations has its handlers."""
