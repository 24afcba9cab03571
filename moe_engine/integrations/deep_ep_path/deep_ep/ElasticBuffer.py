"""Where `from deep_ep import ElasticBuffer` ends: Python looks for a module of this name, too."""

from . import absent

raise ImportError(absent("ElasticBuffer"))
