"""Goes on with the ranks that are left, and takes in those that come."""
