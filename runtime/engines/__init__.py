"""Backends: each module holds one implementation of the Engine of base.py and alone imports its package."""
