"""How fast the links between the nodes of a cluster are, pair by pair, and which are slow."""
