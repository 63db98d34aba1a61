"""Mutants of networks: does the certificate refute each that changes a result, does the CPU device see races?"""
