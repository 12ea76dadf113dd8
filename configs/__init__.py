"""Configuration: every knob (schema.py), how files and overrides become one frozen object (load.py), recipes (*.yaml)."""
