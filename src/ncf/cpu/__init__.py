"""The network on a CPU, fast: forward and backward through buffers, a range of users per core."""
