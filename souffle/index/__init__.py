"""The compiler's one language of index expressions: as plain data, as isl maps, as sums of multiples, on arrays.

The certificate has a language of its own (``verify/expressions.py``), which shares nothing with this one.
"""
