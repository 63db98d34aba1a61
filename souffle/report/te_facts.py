"""The TEs of merged kernels as text, for a report: what a plan does not keep. This needs the compiler."""

from __future__ import annotations

from souffle.kernel.merged_program import MergedProgram
from souffle.program.printer import format_item
from souffle.report.schema import TeFacts
from souffle.schedule.stage import flat_stages

__all__ = ["te_facts"]


def te_facts(merged: MergedProgram) -> dict[str, TeFacts]:
    """The TEs of all launches by name.

    Parameters
    ----------
    merged : MergedProgram
        What the hook ``"merge"`` sees.
    """
    found: dict[str, TeFacts] = {}
    for stage in (stage for launch in merged.launches for stage in flat_stages(launch.stages)):
        outside = set(stage.outputs)
        for te_ in stage.tes:
            inside = [(tensor.name, tensor.nbytes) for tensor in te_.outputs if tensor not in outside]
            found[te_.name] = TeFacts(text="\n".join(format_item(te_)), origin=str(te_.origin), inside=inside)
    return found
