"""The configuration: the table of fields, the reading of YAML, and the model."""
