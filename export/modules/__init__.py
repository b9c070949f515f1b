"""The drafter in torch. Parameter names are DeepSpec's, so a canonical state dict loads without renaming."""

from .backbone import Backbone
from .drafter import Drafter

__all__ = ["Backbone", "Drafter"]
