"""Saving a run, finding what it can resume from, and loading it under any layout."""
