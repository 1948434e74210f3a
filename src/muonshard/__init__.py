"""Muon for parameters that no single rank holds."""
