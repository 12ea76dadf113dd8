"""The estimators against hand calculation, slow loops, enumeration, properties, other systems' faults, and ranks."""
