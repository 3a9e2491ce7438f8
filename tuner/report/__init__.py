"""What a person looks at: the decision, the figures behind it, and what was tried and failed."""
