"""The Buffers, in the modules in which DeepEP V2 and V2.5 define them."""
