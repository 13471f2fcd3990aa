"""Step times of layouts on this machine."""
