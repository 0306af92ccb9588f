"""Arithmetic on plain tensors: the ways to get norms, sums and projections of Σ_t δ_t ⊗ a_t, and what they cost."""
