"""What a run is doing and what it did, from its directory alone."""
