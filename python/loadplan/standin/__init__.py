"""What stands in for a GPU and for InstantTensor on a machine without them."""
