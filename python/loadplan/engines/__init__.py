"""The engines: their releases, patch series, trees, and what upstream would get."""
