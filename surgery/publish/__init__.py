"""Reports, tables, model cards and uploads of finished work."""
