"""A load through a patched engine's own loader, and the proof of what arrived."""
