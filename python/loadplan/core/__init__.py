"""The engine-neutral core: headers, the plan, and the readers that carry it out.

Each module needs only those that stand above it in LAYERS.toml.
"""

VERSION = "0.1.0"
