"""Form the stages of a program: which TEs one schedule computes together (paper §6.3).

TEs are taken in topological order. Each joins the stage that produces its latest input where the level allows it and
the scheduler accepts the joint function with a schedule that is no worse; otherwise it starts a stage of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tvm import tirx

from souffle.analysis import Analysis
from souffle.decision import Decision
from souffle.program import TE, ExternTE, TEProgram
from souffle.schedule.stage import Stage, StageDraft, draft_stage

__all__ = ["Answer", "JoinPolicy", "Scheduler", "form_stages"]


@dataclass(frozen=True)
class Answer:
    """What a scheduler says about a draft.

    Attributes
    ----------
    schedule : object or None
        ``None`` where no schedule without a grid-wide barrier exists.
    rule : str
        The rule that made it.
    rank : int
        Position of the rule in the order of preference; smaller is better.
    rowwise : bool
        Whether dependent reductions of the draft stay within a block.
    tiles : int
        Blocks that share the work.
    reason : str
        Why there is none, or why better rules refused.
    """

    schedule: object | None
    rule: str
    rank: int
    rowwise: bool
    tiles: int
    reason: str


Scheduler = Callable[[tirx.PrimFunc], Answer]


@dataclass(frozen=True)
class JoinPolicy:
    """Which joins a level allows.

    Attributes
    ----------
    across_operators : bool
        Whether one-relies-on-one TEs join the stage of a producer from another operator-fusion group (V2 and later).
        Below, stages stay within TVM's own fusion groups.
    rowwise_across_operators : bool
        Whether reductions join the stage of a producer from another operator when their tiles match, so that the
        tensor between them stays on chip (V4, paper §6.5).
    """

    across_operators: bool
    rowwise_across_operators: bool


_READS_PER_BARRIER = 32 * 1024
"""Elements that one multiprocessor reads in the time of a grid sync: about 1.3 µs at about 100 GB/s."""


def _points(te_: TE) -> int:
    points = te_.outputs[0].size
    for extent in te_.reduction_shape:
        points *= extent
    return points


@dataclass
class _Forming:
    """A stage being formed."""

    tes: list[TE | ExternTE]
    draft: StageDraft
    answer: Answer
    absorbed: bool = field(default=False)


def form_stages(
    program: TEProgram, analysis: Analysis, scheduler: Scheduler, policy: JoinPolicy
) -> tuple[tuple[Stage, ...], tuple[Decision, ...]]:
    """Group the TEs of a program into stages.

    Parameters
    ----------
    program : TEProgram
    analysis : Analysis
        Of `program`.
    scheduler : callable
        Answers for a TensorIR function; called once for each distinct function.
    policy : JoinPolicy

    Returns
    -------
    stages : tuple of Stage
        In topological order.
    decisions : tuple of Decision
        One for each join tried.
    """
    return _Former(program, analysis, scheduler, policy).run()


class _Former:
    def __init__(self, program: TEProgram, analysis: Analysis, scheduler: Scheduler, policy: JoinPolicy) -> None:
        self.program = program
        self.analysis = analysis
        self.scheduler = scheduler
        self.policy = policy
        self.cache: dict[str, Answer] = {}
        self.forming: list[_Forming] = []
        self.stage_of: dict[TE | ExternTE, int] = {}
        self.depth: dict[TE | ExternTE, int] = {}
        self.decisions: list[Decision] = []

    def run(self) -> tuple[tuple[Stage, ...], tuple[Decision, ...]]:
        for te_ in self.program.tes:
            if not self._try_join(te_):
                self._start(te_)
        stages = tuple(Stage(f.draft, f.answer.schedule) for f in self.forming if not f.absorbed)
        return stages, tuple(self.decisions)

    def _answer(self, draft: StageDraft) -> Answer:
        if draft.digest not in self.cache:
            self.cache[draft.digest] = self.scheduler(draft.func)
        return self.cache[draft.digest]

    def _start(self, te_: TE | ExternTE) -> None:
        draft = draft_stage([te_], self.program)
        self.stage_of[te_] = len(self.forming)
        self.depth[te_] = self._depth([te_])
        self.forming.append(_Forming([te_], draft, self._answer(draft)))

    def _try_join(self, te_: TE | ExternTE) -> bool:
        producers = {self.program.producers[t] for t in te_.inputs if t in self.program.producers}
        if isinstance(te_, ExternTE) or not producers:
            return False
        target = max(self.stage_of[p] for p in producers)
        stage = self.forming[target]
        if isinstance(stage.tes[0], ExternTE):
            return False
        refusal = self._precheck(te_, stage)
        joined = [*stage.tes, te_]
        subject = f"{te_.name} into the stage of {stage.draft.name}"
        if refusal is None:
            draft = draft_stage(joined, self.program)
            answer = self._answer(draft)
            refusal = self._compare(te_, stage, answer)
        if refusal is not None:
            self.decisions.append(Decision("schedule", subject, False, refusal))
            return False
        self.decisions.append(Decision("schedule", subject, True, f"one schedule ({answer.rule}) computes both"))
        # The joint stage runs where its last TE stands: everything that it reads is defined by then.
        stage.absorbed = True
        depth = self._depth(joined)
        for member in joined:
            self.stage_of[member] = len(self.forming)
            self.depth[member] = depth
        self.forming.append(_Forming(joined, draft, answer))
        return True

    def _precheck(self, te_: TE, stage: _Forming) -> str | None:
        """Why `te_` must not join, before any schedule is tried; ``None`` if it may."""
        same_group = all(member.origin.group == te_.origin.group for member in stage.tes)
        has_reduction = any(member.is_reduction for member in stage.tes)
        target = self.stage_of[stage.tes[0]]
        late = [m for m in self._members_after(target) if self._reads(m, stage)]
        if late:
            return f"{late[0].name} between them reads the stage"
        if te_.is_reduction and has_reduction:
            if not (same_group or self.policy.rowwise_across_operators):
                return "dependent reductions of different operators meet at a grid sync"
            if any(m.is_reduction and self.analysis.is_compute_intensive(m) for m in (*stage.tes, te_)):
                # A row at a time, every block would read the whole other operand again.
                return "a compute-intensive reduction is tiled on its own"
            return None
        if te_.is_reduction:
            return self._precheck_prologue(te_, stage, same_group)
        if not same_group and not self.policy.across_operators:
            return "TVM's operator fusion keeps them apart"
        if self._covers(te_, stage):
            return None
        if has_reduction:
            return None if same_group else "its elements are not those of the stage: it would repeat the reduction"
        if any(self.analysis.arithmetic(member).expensive for member in stage.tes):
            return "its elements are not those of the stage: it would repeat an expensive expression"
        return None

    def _precheck_prologue(self, te_: TE, stage: _Forming, same_group: bool) -> str | None:
        if not same_group and not self.policy.across_operators:
            return "TVM's operator fusion keeps them apart"
        outputs = [t for member in stage.tes for t in member.outputs]
        inside = {*stage.tes, te_}
        if any(consumer not in inside for t in outputs for consumer in self.program.consumers[t]):
            return "other TEs read the stage too"
        if any(t in self.program.outputs for t in outputs):
            return "the stage holds an output of the network"
        if any(self.analysis.arithmetic(member).expensive for member in stage.tes):
            return "the reduction would repeat an expensive expression"
        return None

    def _too_serial(self, te_: TE, stage: _Forming, answer: Answer) -> str | None:
        """Keep work on many multiprocessors where one block would take longer than a barrier."""
        if all(member.origin.group == te_.origin.group for member in stage.tes):
            return None
        delayed = self._delays(te_, stage)
        if delayed is not None:
            return f"{delayed} reads the stage too and would wait for it longer"
        reads = sum(_points(member) for member in (*stage.tes, te_)) // answer.tiles
        if reads <= _READS_PER_BARRIER:
            return None
        return f"a block would read {reads} elements alone, which takes longer than a grid sync ({_READS_PER_BARRIER})"

    def _delays(self, te_: TE, stage: _Forming) -> str | None:
        """Another reader of the stage that a join would put behind more grid syncs, since `te_` waits for others."""
        before = self._depth(stage.tes)
        if self._depth([*stage.tes, te_]) == before:
            return None
        inside = {*stage.tes, te_}
        outputs = [t for member in stage.tes for t in member.outputs]
        return next((c.name for t in outputs for c in self.program.consumers[t] if c not in inside), None)

    def _depth(self, tes: list[TE | ExternTE]) -> int:
        """Stages on the longest path to these TEs."""
        inside = set(tes)
        producers = {self.program.producers[t] for te_ in tes for t in te_.inputs if t in self.program.producers}
        return max((self.depth[p] + 1 for p in producers - inside), default=0)

    def _covers(self, te_: TE, stage: _Forming) -> bool:
        sizes = {m.outputs[0].size for m in stage.tes}
        return te_.outputs[0].size in sizes

    def _members_after(self, index: int) -> list[TE | ExternTE]:
        return [m for f in self.forming[index + 1 :] if not f.absorbed for m in f.tes]

    def _reads(self, te_: TE | ExternTE, stage: _Forming) -> bool:
        outputs = {t for member in stage.tes for t in member.outputs}
        return any(t in outputs for t in te_.inputs)

    def _compare(self, te_: TE, stage: _Forming, answer: Answer) -> str | None:
        if answer.schedule is None:
            return answer.reason
        anchored = any(member.is_reduction for member in stage.tes)
        if te_.is_reduction and anchored:
            if not answer.rowwise:
                return f"their tiles do not match: {answer.reason}"
            return self._too_serial(te_, stage, answer)
        if te_.is_reduction:
            alone = self._answer(draft_stage([te_], self.program))
        else:
            alone = stage.answer
        if answer.rank > alone.rank:
            return f"the joint schedule would be worse ({answer.rule} instead of {alone.rule}): {answer.reason}"
        return None
