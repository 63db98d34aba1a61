"""Form the stages of a program: which TEs one schedule computes together (paper §6.3).

TEs are taken in topological order. Each joins the stage that produces its latest input where the level allows it and
the scheduler accepts the joint function with a schedule that is no worse; otherwise it starts a stage of its own.
The statements of a fused TE were found to belong together, so they are tried at once first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from souffle.analysis import Analysis
from souffle.decision import Decision, Refused
from souffle.errors import SouffleError
from souffle.program import TE, ExternTE, FusedTE, Loop, TEProgram
from souffle.schedule.chain_joins import join_chains
from souffle.schedule.drafts import Answer, Drafts, Formed, FormedLoop, Scheduler, stands_alone
from souffle.schedule.on_chip_reuse import join_rows
from souffle.schedule.owned_tiles import join_owned
from souffle.schedule.stage import LoopStage, Unit

__all__ = ["JoinPolicy", "StageError", "form_stages"]

LONG_TILE = 1 << 14
"""Elements of a TE in one tile from which it is asked whether more tiles of its own would take less time: 64 for each
of 256 threads. Asking takes as long as scheduling the TE again."""


class StageError(SouffleError):
    """A TE has no schedule at all; the message names it and what each rule says."""


Join = Callable[[Sequence[Formed | FormedLoop], Analysis, Drafts], tuple[list[Formed | FormedLoop], list[Decision]]]
"""Joins formed stages, and says what was tried."""


@dataclass(frozen=True)
class JoinPolicy:
    """Which joins a level allows.

    Attributes
    ----------
    across_operators : bool
        Whether one-relies-on-one TEs join the stage of a producer from another operator-fusion group (V2 and later).
        Below, stages stay within TVM's own fusion groups.
    on_chip : frozenset of str
        Which of :data:`souffle.options.ON_CHIP` may keep tensors on chip across operators (V4, paper §6.5). With
        ``"reuse"``, whole stages of different operators are joined when their tiles match: see
        :mod:`souffle.schedule.on_chip_reuse`; with ``"channels"`` where tiles can own units of an axis through all of
        them: see :mod:`souffle.schedule.owned_tiles`.
    group_of : mapping of TE or ExternTE to str, optional
        The groups that stages stay within, and joins on chip too, in the place of TVM's fusion groups: the patterns of
        a fusion plan. The TEs of a group stand together in the program.
    compose : callable, optional
        Joins the stages of a group further, after all other joins: from stages, the analysis of their program and
        :class:`souffle.schedule.drafts.Drafts` to stages and decisions.
    """

    across_operators: bool
    on_chip: frozenset[str] = frozenset()
    group_of: Mapping[TE | ExternTE | Loop, str] | None = None
    compose: Join | None = None

    def group(self, te_: TE | ExternTE | Loop) -> str:
        """What a TE is only joined with TEs of, unless joins go across operators."""
        return te_.origin.group if self.group_of is None else self.group_of[te_]


def form_stages(
    program: TEProgram, analysis: Analysis, scheduler: Scheduler, policy: JoinPolicy
) -> tuple[tuple[Unit, ...], tuple[Decision, ...]]:
    """Group the TEs of a program into stages.

    Parameters
    ----------
    program : TEProgram
        May hold fused TEs and loops.
    analysis : Analysis
        Of ``program.expanded()``.
    scheduler : Scheduler
    policy : JoinPolicy

    Returns
    -------
    stages : tuple of Stage or LoopStage
        In topological order; they hold the TEs of ``program.expanded()``.
    decisions : tuple of Decision
        One for each join tried.
    """
    formed, decisions = _formed(program, analysis, Drafts(analysis.program, scheduler), policy)
    units: list[Unit] = []
    for item in formed:
        loop = isinstance(item, FormedLoop)
        members = item.stages if loop else (item,)
        stages = tuple(member.stage() for member in members)
        units += [LoopStage(item.loop, stages)] if loop else stages
        decisions += [Decision("stage", member.draft.name, True, member.answer.summary) for member in members]
    return tuple(units), tuple(decisions)


def _formed(
    program: TEProgram, analysis: Analysis, drafts: Drafts, policy: JoinPolicy
) -> tuple[list[Formed | FormedLoop], list[Decision]]:
    former = _Former(program, analysis, drafts, policy)
    formed, decisions = former.run(), former.decisions
    if policy.group_of is None:
        return _joined_on_chip(formed, analysis, drafts, policy, decisions), decisions
    groups = groupby(formed, lambda one: policy.group(one.tes[0]))
    parts = [_joined_on_chip(list(group), analysis, drafts, policy, decisions) for _, group in groups]
    return [stage for part in parts for stage in part], decisions


def _joined_on_chip(
    formed: list[Formed | FormedLoop],
    analysis: Analysis,
    drafts: Drafts,
    policy: JoinPolicy,
    decisions: list[Decision],
) -> list[Formed | FormedLoop]:
    """Stages joined with each other as the policy allows; the decisions are added to those given."""
    known: tuple[tuple[str, Join], ...] = (("attention", join_chains), ("channels", join_owned), ("reuse", join_rows))
    joins = [join for name, join in known if name in policy.on_chip]
    for join in joins if policy.compose is None else [*joins, policy.compose]:
        if formed:
            together, joined = join(formed, analysis, drafts)
            formed = [_with_parts(stage, formed) for stage in together]
            decisions += joined
    return formed


def _with_parts(stage: Formed | FormedLoop, apart: Sequence[Formed | FormedLoop]) -> Formed | FormedLoop:
    """A stage that knows of which it was joined: where a join has not said so, of those before all joins."""
    if isinstance(stage, FormedLoop) or stage.parts or any(stage is one for one in apart):
        return stage
    return replace(stage, parts=tuple(one for one in apart if set(one.tes) <= set(stage.tes)))


class _Former:
    def __init__(self, program: TEProgram, analysis: Analysis, drafts: Drafts, policy: JoinPolicy) -> None:
        self.fused = {item.parts[0]: item.parts[1:] for item in program.tes if isinstance(item, FusedTE)}
        self.bodies = {item.name: item for item in program.tes if isinstance(item, Loop)}
        self.program = analysis.program
        self.analysis = analysis
        self.drafts = drafts
        self.policy = policy
        self.forming: list[Formed | FormedLoop | None] = []
        self.stage_of: dict[TE | ExternTE, int] = {}
        self.decisions: list[Decision] = []

    def run(self) -> list[Formed | FormedLoop]:
        done = 0
        while done < len(self.program.tes):
            te_ = self.program.tes[done]
            if isinstance(te_, Loop):
                self._place(self._loop(te_))
                done += 1
                continue
            if _is_ahead(te_):
                te_, done = self._ahead(done)
            elif not self._try_join(te_):
                self._place(self._alone(te_))
            done += 1
            rest = self.fused.get(te_)
            done += self._join_followers(self._followers(te_, done) if rest is None else [*rest])
        return [formed for formed in self.forming if formed is not None]

    def _alone(self, te_: TE | ExternTE) -> Formed:
        formed = self.drafts.formed([te_])
        if formed.answer.schedule is None:
            where = f"TE {te_.name} ({te_.origin}), shape {te_.outputs[0].shape}"
            raise StageError(f"{where}, cannot be scheduled: {formed.answer.reason}")
        return formed

    def _ahead(self, start: int) -> tuple[TE, int]:
        """Place a contraction with what is ahead of it for its rows, from `start` on; it, and where it stands."""
        end = next((n for n in range(start, len(self.program.tes)) if not _is_ahead(self.program.tes[n])), None)
        if end is None:
            raise StageError(f"TE {self.program.tes[start].name} is for the rows of a contraction that does not follow")
        formed = self.drafts.formed(self.program.tes[start : end + 1])
        if formed.answer.schedule is None:
            contraction = self.program.tes[end]
            where = f"TE {contraction.name} ({contraction.origin}), with {end - start} TEs for its rows"
            raise StageError(f"{where}, cannot be scheduled: {formed.answer.reason}")
        self._place(formed)
        return self.program.tes[end], end

    def _loop(self, loop: Loop) -> FormedLoop:
        """A loop; what belongs together in its body is known from the program before its parts were taken apart."""
        inside = self.analysis.inside(loop)
        fused = self.program.body(self.bodies[loop.name])
        formed, decisions = _formed(fused, inside, self.drafts.of(inside.program), self.policy)
        self.decisions += decisions
        return FormedLoop(loop, tuple(formed))

    def _place(self, formed: Formed | FormedLoop) -> None:
        """Append a stage. One that takes in an earlier one runs later, when all that its last TE reads is defined."""
        for member in formed.tes:
            if member in self.stage_of:
                self.forming[self.stage_of[member]] = None
            self.stage_of[member] = len(self.forming)
        self.forming.append(formed)

    def _try_join(self, te_: TE | ExternTE) -> bool:
        producers = {self.program.producers[t] for t in te_.inputs if t in self.program.producers}
        if isinstance(te_, ExternTE) or not producers:
            return False
        stage = self.forming[max(self.stage_of[p] for p in producers)]
        if stands_alone(stage):
            return False
        joined = self._joined(te_, stage)
        self.decisions.append(_decision(te_, stage, joined))
        if isinstance(joined, Refused):
            return False
        self._place(joined)
        return True

    def _joined(self, te_: TE, stage: Formed) -> Formed | Refused:
        """The stage with `te_` in it, or why it must not join."""
        refusal = self._precheck(te_, stage)
        if refusal is not None:
            return refusal
        joined = self.drafts.formed([*stage.tes, te_])
        return self._compare(te_, stage, joined.answer) or self._starved(te_, stage, joined.answer) or joined

    def _followers(self, te_: TE | ExternTE, start: int) -> list[TE]:
        """The TEs from `start` on that :meth:`_precheck` lets join the stage of `te_` one after another."""
        inside = {te_}
        followers: list[TE] = []
        for follower in self.program.tes[start:]:
            if isinstance(te_, ExternTE) or not isinstance(follower, TE) or follower.is_reduction:
                break
            if self.policy.group(follower) != self.policy.group(te_) or follower.outputs[0].size != te_.outputs[0].size:
                break
            if not any(self.program.producers.get(tensor) in inside for tensor in follower.inputs):
                break
            inside.add(follower)
            followers.append(follower)
        return followers

    def _join_followers(self, followers: list[TE]) -> int:
        """Join the first of `followers`, of one operator or fused TE, to the stage placed last, and say how many.

        As many as one schedule takes, at once: joined one by one, a long chain would be scheduled at every length.
        """
        stage = self.forming[-1]
        count = len(followers) if followers and self._belong_together(stage, followers) else 0
        while count > 1:
            joined = self.drafts.formed([*stage.tes, *followers[:count]])
            # A reduction behind its prologue is held to the schedule that it has alone.
            measure = next((te_ for te_ in followers[:count] if te_.is_reduction), followers[0])
            if self._compare(measure, stage, joined.answer) is None:
                self.decisions.extend(_decision(te_, stage, joined) for te_ in followers[:count])
                self._place(joined)
                return count
            count //= 2
        return 0

    def _belong_together(self, stage: Formed, followers: Sequence[TE]) -> bool:
        """Whether followers may join before the scheduler is asked: as one operator, or as one TE does."""
        if stage.tes[-1] in self.fused:
            return self._precheck(followers[0], stage) is None
        return len({self.policy.group(member) for member in (*stage.tes, *followers)}) == 1

    def _precheck(self, te_: TE, stage: Formed) -> Refused | None:
        """Why `te_` must not join, before any schedule is tried; ``None`` if it may."""
        same_group = all(self.policy.group(member) == self.policy.group(te_) for member in stage.tes)
        if not same_group and not self.policy.across_operators:
            planned = "TVM's operator fusion" if self.policy.group_of is None else "the fusion plan"
            return Refused(f"{planned} keeps them apart")
        between = self._reader_between(stage)
        if between is not None:
            return Refused(f"{between.name} between them reads the stage")
        if _starts_in(te_, stage):
            return None
        has_reduction = any(member.is_reduction for member in stage.tes)
        if te_.is_reduction and has_reduction:
            if not same_group:
                return Refused("dependent reductions of different operators meet at a grid sync")
            if any(m.is_reduction and self.analysis.is_compute_intensive(m) for m in (*stage.tes, te_)):
                # A row at a time, every block would read the whole other operand again.
                return Refused("a compute-intensive reduction is tiled on its own")
            return None
        if te_.is_reduction:
            return self._precheck_prologue(te_, stage)
        if te_.outputs[0].size in {member.outputs[0].size for member in stage.tes}:
            return None
        if same_group and self.policy.group_of is not None:
            # What is computed again is the plan's to say.
            return None
        if has_reduction:
            reason = "its elements are not those of the stage: it would repeat the reduction"
            return None if same_group else Refused(reason)
        if any(self.analysis.arithmetic(member).expensive for member in stage.tes):
            return Refused("its elements are not those of the stage: it would repeat an expensive expression")
        return None

    def _precheck_prologue(self, te_: TE, stage: Formed) -> Refused | None:
        outputs = [t for member in stage.tes for t in member.outputs]
        inside = {*stage.tes, te_}
        if any(consumer not in inside for t in outputs for consumer in self.program.consumers[t]):
            return Refused("other TEs read the stage too")
        if any(t in self.program.outputs for t in outputs):
            return Refused("the stage holds an output of the network")
        if any(self.analysis.arithmetic(member).expensive for member in stage.tes):
            return Refused("the reduction would repeat an expensive expression")
        return None

    def _reader_between(self, stage: Formed) -> TE | ExternTE | None:
        """A TE outside the stage that reads it and is placed already: it would have to run before and after."""
        inside = set(stage.tes)
        outputs = [t for member in stage.tes for t in member.outputs]
        readers = (c for t in outputs for c in self.program.consumers[t])
        return next((c for c in readers if c not in inside and c in self.stage_of), None)

    def _compare(self, te_: TE, stage: Formed, answer: Answer) -> Refused | None:
        if answer.schedule is None:
            return Refused(answer.reason)
        if te_.is_reduction and _starts_in(te_, stage):
            starts = answer.rank <= stage.answer.rank
            return None if starts else Refused(f"it cannot start in the tiles: {answer.reason}")
        anchored = any(member.is_reduction for member in stage.tes)
        if te_.is_reduction and anchored:
            return None if answer.rowwise else Refused(f"their tiles do not match: {answer.reason}")
        alone = self.drafts.formed([te_]).answer if te_.is_reduction else stage.answer
        if answer.rank > alone.rank:
            return Refused(
                f"the joint schedule would be worse ({answer.rule} instead of {alone.rule}): {answer.reason}"
            )
        return None

    def _starved(self, te_: TE, stage: Formed, answer: Answer) -> Refused | None:
        """That the tiles of a reduction, of which there may be few, would take long over a TE of many more elements.

        Such as a table of which a few rows change: its columns, as tiles hold them whole, are far fewer than the blocks
        that could copy it.
        """
        if te_.is_reduction or te_.outputs[0].size < LONG_TILE * answer.tiles:
            return None
        if te_.outputs[0].size in {member.outputs[0].size for member in stage.tes}:
            return None
        seconds = self.drafts.scheduler.seconds
        together, before = seconds(answer), seconds(stage.answer)
        alone = self.drafts.formed([te_]).answer
        if together is None or before is None or alone.schedule is None:
            return None
        apart = before + seconds(alone)
        if together <= apart * self.drafts.scheduler.error:
            return None
        return Refused(f"{answer.tiles} tiles take {together * 1e6:.1f} µs for both, apart they take {apart * 1e6:.1f}")


def _decision(te_: TE, stage: Formed, joined: Formed | Refused) -> Decision:
    """That a TE joined a stage, or why it did not."""
    subject = f"{te_.name} into the stage of {stage.draft.name}"
    if isinstance(joined, Refused):
        return Decision("schedule", subject, False, joined.reason)
    return Decision("schedule", subject, True, f"one schedule ({joined.answer.rule}) computes both")


def _is_ahead(te_: TE | ExternTE) -> bool:
    """Whether a transformation made it to be computed for the rows of the contraction that follows it."""
    return isinstance(te_, TE) and te_.placement is not None and te_.placement.phase == "rows"


def _starts_in(te_: TE, stage: Formed) -> bool:
    """Whether a transformation made a TE to be computed in the tiles of the stage's contraction."""
    return te_.placement is not None and te_.placement.contraction in {member.name for member in stage.tes}
