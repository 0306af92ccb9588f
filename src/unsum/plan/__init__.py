"""What was learnt of one layout of a graph, and the running of it."""
