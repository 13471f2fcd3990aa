"""The run itself: setup, the loop, one step, evaluation, the end."""
