"""Where `from deep_ep import HybridEPBuffer` ends: Python looks for a module of this name, too."""

from . import absent

raise ImportError(absent("HybridEPBuffer"))
