"""A network beside other compilers on one machine: outputs compared first, then timed in turn.

``bench.py`` is what users call, ``measure.py`` the page. A peer is one file, behind the protocol in ``peer.py``.
"""
