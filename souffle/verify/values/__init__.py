"""Whether stage functions compute what they are meant to: random evaluation over a finite field.

The certificate (:mod:`souffle.verify.certify`) says that what a kernel reads was written before, not that it is the
right element. This package runs the lowered TensorIR of a stage and its definition, TensorIR as it was before any
schedule, on the same random inputs and compares outputs exactly. Numbers are elements of the field with
``P = 2**31 - 1`` elements, sums and products are those of the field, so that the order of sums, tiles, warps and
the parts of a reduction make no difference, while a wrong element, guard, turn or operator does.

What it says, and with which probability
----------------------------------------
Sums, products, differences, quotients and literals (exact rationals) are rational functions of the inputs. Two of them
that are equal over the rationals are equal here. Two that differ there agree at a random point with probability at most
``d / P``, for each element that is compared, where `d` is the degree of their difference, as polynomials over one
denominator (Schwartz 1980, Zippel 1979): a few factors that stages multiply with each other, and one for each number in
a sum of quotients. They must differ modulo `P` for that; literals whose difference is a multiple of `P` are taken for
the same. A denominator is 0 with the same small probability, and its inverse is then taken for 0, on both sides. What
divides by the literal 0, or calculates with an infinite one, is refuted where the definition does not
(:mod:`souffle.verify.values.infinities`).

``exp``, ``erf`` and all else that is no field operation is a random function of its arguments, named alike on both
sides: two calls are equal if names and arguments are, and otherwise with probability ``1 / P`` (random interpretation
of functions of which nothing is known: Gulwani and Necula, POPL 2003 and 2004). A keyed mixing of 64 bits stands for
random.

Comparisons, minima and maxima follow a total order of the field, in which only infinities and literals have their
place, so that any tree of maxima finds the same one. A comparison tells two texts apart only where its outcome is seen,
so that where numbers or data are compared, several points are tried (:mod:`souffle.verify.values.points`):

- in the large field, where numbers are never equal by chance, with zero and the literals of both texts before all other
  numbers, and with them after: a maximum that starts at 0 shows;
- with inputs that rise or fall along their tensor: the last and the first term of a maximum win;
- in a field of a few dozen elements, where any two numbers, whatever was calculated to get them, are equal now and
  then, sums and values of ``exp`` among them: what holds at equality alone shows. Inputs are random, or equal along
  some axes of their tensor, such as all of a row. Literals that differ are still apart;
- with each maximum taken for a sum, where a reduction compares: a term that is left out shows though it does not win.
  A stage that differs there alone, which one that takes a term twice does too, is given 64 points of other orders to
  show that it is wrong, and is undecided if none does;
- and, where a comparison was not seen to come out in all ways so far, with half of the inputs zero, one, minus one or
  one of the literals.

For each comparison, minimum and maximum of data, in the definition and in the functions, it is noted whether the first
operand was seen to be less, equal and more (:mod:`souffle.verify.values.sightings`); a stage that takes little work is
given up to 16 points until all were. What was not seen is named in the certificate. An agreement of such stages is
evidence, without a bound.

Integers and comparisons that are calculated in ``float32`` or ``float64`` from whole numbers alone, such as where the
elements of a resized image lie, are those of the machine (:mod:`souffle.verify.values.positions`). What data are
multiplied with is of the field, like all else.

What is not run is not compared: by default the first and the last tile of a function, three more, and as many as take
little work. For the others it is worked out where they write, unless that depends on data, so that an element that no
tile writes is found.

What it does not say
--------------------
Nothing on rounding: casts between floating-point types change nothing here, so that a total kept in 16 bits, a cast
that is missing, or an order of sums that cancels does not show. Nothing on overflow, infinities that arise, or NaN: 0
times what was never written is 0 here, a calculation with an infinity gives another number, zero has no sign, and no
number is NaN, so that what a choice gives for one is not looked at.
Nothing on integers of tensors beyond their type, which are exact. Other integers are shown to stay in theirs
(:func:`souffle.verify.bounds.calculated`), or, where data decide whether they do, up to 64 points look for data with
which an element is wrong or a whole number is divided by zero; if none shows it, nothing is said.

Nothing on waiting: all threads go in step, copies arrive at once, and barriers do nothing. That is one of the orders in
which threads may run; the certificate, which finds barriers that are missing, says that all orders give the same.
Nothing on how a kernel calls its stages (``verify/definitions_found.py``), nor on the translation of TensorIR to CUDA.

Identities of real numbers that a field does not have (``max(a, b) + c``), and literals that are rounded when they are
combined, would be reported as differences. No stage of the models or of the tests has one, but for ``exp(a + b) =
exp(a) exp(b)``: texts that differ at the first point are compared again with numbers in which that holds
(:mod:`souffle.verify.values.exponentials`).

What cannot be said is :class:`souffle.verify.expressions.Undecided`, with the reason.

The idea of testing tensor programs in finite fields is that of Mirage (OSDI 2025), which searches for programs and
gives exponentials a second field; here the text of one thread is run, with its guards, copies and fragments.
"""

from souffle.verify.values.agreement import StageFunction, values_agree
from souffle.verify.values.network_values import StageText, compare_stages, values_section
from souffle.verify.values.results import Agreement, FunctionComparison, Mismatch

__all__ = [
    "Agreement",
    "FunctionComparison",
    "Mismatch",
    "StageFunction",
    "StageText",
    "compare_stages",
    "values_agree",
    "values_section",
]
