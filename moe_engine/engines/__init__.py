"""What carries out a Buffer's calls: kernels on symmetric memory, or torch.distributed."""
