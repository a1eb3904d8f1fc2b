"""A checkpoint as it lies on a disk: files, placement, oddities, memory."""
