"""The gradients of one parameter by sample, not multiplied out: a structure for each kind, every read written once."""
