"""Golden vectors: cases of others' float64 references, run through the product's own functions."""
