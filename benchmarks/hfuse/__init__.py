"""Horizontal fusion in the thread space of a block, over kernels of the kinds that HFuse was tried on (§IV).

``kernels/`` has nine CUDA files, written from the public definitions of what they compute, ``workloads`` their launches
by size and the pairs that are fused, ``references`` and ``hash_references`` what they must give. ``pairs`` fuses all
pairs and compares bits and registers without a GPU, ``gpu`` measures them on one.
"""
