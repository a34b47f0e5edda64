"""A dataset becomes a model."""
