"""What flows through modules: one way for every call, forward and backward, for captures and edits."""
