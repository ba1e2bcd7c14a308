"""Floor 5: one dense prefill of a context that every press compresses a copy of, and what is done with the copies."""
