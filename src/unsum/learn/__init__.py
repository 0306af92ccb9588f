"""Learning a graph: what is data, where samples are known, whose every position is, and which rules hold."""
