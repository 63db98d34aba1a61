"""Random kernels, right by construction or with planted mistakes: what the certificate says, and what they do.

:mod:`benchmarks.siege.forms` has the forms of stages, and a new one is a function there;
:mod:`benchmarks.siege.kernels` puts stages into kernels; :mod:`benchmarks.siege.mistakes` plants mistakes in their
TensorIR, whatever form it has; :mod:`benchmarks.siege.judge` asks the checker and the CPU device.
"""
