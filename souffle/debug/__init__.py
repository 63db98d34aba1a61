"""Where a network goes wrong: its values compared step by step (``souffle debug``)."""
