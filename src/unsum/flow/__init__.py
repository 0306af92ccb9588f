"""What flows through modules: one lane for a call, forward and backward, for captures and edits."""
