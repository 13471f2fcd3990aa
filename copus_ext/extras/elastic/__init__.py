"""Live recovery: runs that go on when ranks or nodes are lost, and take in new ones."""
