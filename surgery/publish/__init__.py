"""Reports, tables, model cards and uploads of converted checkpoints."""
