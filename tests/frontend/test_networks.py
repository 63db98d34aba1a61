"""Networks as torch exports them, by both exporters, against ONNX Runtime."""

from __future__ import annotations

import pytest

from tests.frontend.support import compare

pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from tests.networks import EXPORTERS, NETWORKS, export


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("name", NETWORKS)
def test_exported_network(name, exporter):
    compare(export(name, exporter))
