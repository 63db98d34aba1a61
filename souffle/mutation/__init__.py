"""Mutants of compiled networks: one barrier, predicate, index or place of a tensor changed, to test the tests.

:class:`souffle.mutation.mutants.Mutations` lists and makes them, :mod:`souffle.mutation.trial` asks the certificate and
the CPU device about each. This file imports nothing, since the process that runs mutants has no TVM.
"""
