"""The configuration: its fields, its YAML, and the values that come of them."""
