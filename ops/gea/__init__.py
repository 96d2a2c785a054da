"""The name under which GEA is used from outside: `python -m gea` is the command `gea`.

Everything lives in the packages `schemas`, `streams`, `workers` and `ops`; this one only leads there, and nothing of
ours imports it.
"""
