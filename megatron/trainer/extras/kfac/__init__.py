"""K-FAC in front of Adam."""
