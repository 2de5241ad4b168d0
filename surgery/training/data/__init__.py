"""Training text: sources, documents, tokens, packed batches."""
