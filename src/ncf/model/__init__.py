"""NeuMF in plain autograd: the reference."""
