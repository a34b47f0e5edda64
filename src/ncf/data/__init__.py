"""A prepared dataset: interactions, raw ids, unseen items; in memory and on disk."""
