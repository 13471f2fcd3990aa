"""One run at a time, a sound environment, hangs noticed, and how a run ended."""
