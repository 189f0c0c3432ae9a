"""What one GPU can show of this package, without Ray and without installing it: `scripts/gpu_check`."""
