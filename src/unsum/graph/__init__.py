"""The autograd graph that a backward is about to walk: read, called again, and asked whose each position is."""
