"""`from deep_ep import HybridEPBuffer` imports this module, as the package has no such name."""

from . import absent

raise ImportError(absent("HybridEPBuffer"))
