"""The guard's model in PyTorch, for comparison: written as one writes it there, with weights that convert both ways."""
