"""A log becomes a dataset."""
