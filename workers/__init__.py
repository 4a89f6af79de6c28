"""The worker processes: each runs the model on one batch after the other and writes the rows into its arena."""
