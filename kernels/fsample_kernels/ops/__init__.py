"""GPU kernels, one file each; imported only when a GPU path is chosen."""
