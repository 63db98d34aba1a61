"""The compiler's one language of index expressions: its operations, expressions as plain data, and their readings.

A reading says what each operation does: on arrays of numbers, on bounds, on sums of multiples, on isl's quasi-affine
functions. The certificate has a language of its own (``verify/expressions.py``), which shares nothing with this one.
"""
