"""One step of a `gradients` block: the forward that it sees, the plan of its graph, the backward, what it collects."""
