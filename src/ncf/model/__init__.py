"""A batch becomes scores."""
