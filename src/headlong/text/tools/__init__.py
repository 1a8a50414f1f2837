"""Tool calls in a model's own words: reading them, and forcing their form. Knows no HTTP and no engine."""
