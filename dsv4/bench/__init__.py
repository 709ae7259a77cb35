"""Measurements of the library on this machine, and the record that names how each was made."""
