"""Measurements of the optimizer, run by hand; the counting tools are also used by the tests."""
