"""docs/results.md, made from its chapters in docs/results/page/ and the figures in docs/results/*.json.

A chapter is Markdown in which a table is one line that names a way of showing figures and the files that hold them::

    {{ table certificates: certificates_tiny.json certificates_paper.json }}

``files.py`` reads the files and what their headers say of how they came to be, ``views/`` makes tables of their
figures, ``changes.py`` says which changes of the compiler a table is older than, ``page.py`` puts the page together.
"""
