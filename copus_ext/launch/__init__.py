"""Starting a run, and starting it again."""
