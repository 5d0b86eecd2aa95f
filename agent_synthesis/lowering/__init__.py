"""From ATen calls to loop nests: `groups` lowers, by the `handlers` of each family of operations."""
