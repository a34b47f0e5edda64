"""Several processes train one model."""
