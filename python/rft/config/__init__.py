"""The TOML file as strict pydantic tables: option, type, default, help text and JSON Schema in one place. No torch."""
